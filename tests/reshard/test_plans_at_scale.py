"""Plans of the largest models on a laptop: each in a process of its own, whose memory is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import ParallelConfig
from megarl.model.families import declare
from megarl.model.role_layout import role_layout
from megarl.reshard.layouts import sglang_layout
from megarl.reshard.plan import Place, plan

BUCKET = 512 * 2**20
GIB = 2**30

LLAMA_405B = {
    "model_type": "llama",
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
CASES: dict[str, tuple[dict[str, Any], int, ParallelConfig, int]] = {
    "llama 405b": (
        LLAMA_405B,
        1024,
        ParallelConfig(tensor=8, pipeline=16, first_stage_layers=7, last_stage_layers=7),
        1,
    ),
    "qwen3 235b": (
        QWEN3_235B,
        64,
        ParallelConfig(expert=8, pipeline=8, first_stage_layers=11, last_stage_layers=11),
        16,
    ),
}
"""The model, the ranks, the actor's sizes and SGLang's expert size; its tensor size is 16, nodes have 8 GPUs."""


def measured(case: str) -> dict[str, Any]:
    """Seconds of one core, the most memory, and figures of the plan: of each GPU the bytes that it sends and receives,
    of each bucket the most that a GPU has of it."""
    sizes, num_ranks, parallel, expert = CASES[case]
    model = SimpleNamespace(**sizes)
    start = time.process_time()
    source = role_layout("actor", model, parallel, num_ranks, fused_norms=True)
    target = sglang_layout(declare(model), 16, num_ranks // 16, 64, expert)
    places = [Place(rank // 8, rank % 8) for rank in range(num_ranks)]
    made = plan(source, target, 2, places, places, BUCKET)
    seconds = time.process_time() - start
    memory = most_resident_bytes()
    sent, received = [0] * num_ranks, [0] * num_ranks
    for copy in made.copies:
        received[copy.target_rank] += 2 * copy.rect.size
        if copy.source_rank != copy.target_rank:
            sent[copy.source_rank] += 2 * copy.rect.size
    return {
        "seconds": seconds,
        "memory": memory,
        "copies": len(made.copies),
        "sent": sent,
        "received": received,
        "summary": vars(made.summary()),
    }


def most_resident_bytes() -> int:
    """Of this process; getrusage counts what the parent had when it forked too."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def in_a_process_of_its_own(case: str) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, case]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{case}: {found['copies']:,} copies in {found['seconds']:.1f} s, {found['memory'] / GIB:.2f} GiB")
    return found


def check(found: dict[str, Any], per_replica: int, num_replicas: int) -> None:
    """per_replica: elements that the ranks of an SGLang replica hold together."""
    summary = found["summary"]
    assert found["memory"] < 2 * GIB
    assert summary["written"] == 2 * per_replica * num_replicas == sum(found["received"])
    assert summary["local"] + summary["intra_node"] + summary["inter_node"] == summary["written"]
    assert summary["crossing_lower_bound"] == summary["intra_node"] + summary["inter_node"] == sum(found["sent"])
    assert 0.95 * BUCKET < summary["peak_buffer"] <= BUCKET
    busiest = max(map(sum, zip(found["sent"], found["received"], strict=True)))
    assert busiest / BUCKET <= summary["num_buckets"] < 1.15 * busiest / BUCKET + 1


def test_llama_405b_from_1024_ranks_to_64_replicas() -> None:
    found = in_a_process_of_its_own("llama 405b")
    parameters = 405_853_388_800
    norms = (2 * 126 + 1) * 16384
    keys_and_values = 126 * 2 * 8 * 128 * 16384
    # 16 ranks have each norm, and two of them each of the 8 key/value heads.
    check(found, parameters + 15 * norms + keys_and_values, 64)
    assert max(found["sent"]) < 1.02 * sum(found["sent"]) / 1024


def test_qwen3_235b_from_64_ranks_to_4_replicas() -> None:
    found = in_a_process_of_its_own("qwen3 235b")
    parameters = 235_093_634_560
    norms_and_routers = 94 * (2 * 4096 + 2 * 128 + 128 * 4096) + 4096
    keys_and_values = 94 * 2 * 4 * 128 * 4096
    # 16 ranks have each norm and each router, and four of them each of the 4 key/value heads.
    check(found, parameters + 15 * norms_and_routers + 3 * keys_and_values, 4)


if __name__ == "__main__":
    json.dump(measured(sys.argv[1]), sys.stdout)
