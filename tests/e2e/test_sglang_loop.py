"""The loop with real SGLang on the CPU: the same driver, plan and sync as on a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(("num_gpus", "prompts"), [(0, 128), (1, 32)], ids=["colocated", "split"])
def test_two_steps_with_sglang_agree_with_megatron(tmp_path: Path, num_gpus: int, prompts: int) -> None:
    """Weights change between the syncs; after each, SGLang's log-probs of what it sampled are Megatron's. Split: the
    actor's two tensor-parallel ranks send to one engine rank, through a receiver. Answers carry the version of their
    sync, or the loop would refuse them."""
    output = runs.train(
        str(runs.QUICKSTART),
        "run.total_steps=2",
        "run.validate_before_training=false",
        "run.save_model=false",
        "rollout.engine=sglang",
        f"rollout.num_gpus={num_gpus}",
        "rollout.sglang.max_running_requests=64",
        f"data.prompts_per_step={prompts}",
        f"actor.batch.mini_batch_prompts={prompts // 2}",
        f"critic.batch.mini_batch_prompts={prompts // 2}",
        f"run.dir={tmp_path}",
    )
    assert re.search(r"weight sync: .* local 0.0 MB" if num_gpus else r"weight sync: ", output)
    found = runs.metrics(tmp_path)
    assert sorted(found) == [1, 2]
    for step, entry in found.items():
        assert entry["training/rollout_logprobs_abs_diff_mean"] < 1e-4, step
        assert entry["actor/skipped_updates"] == 0
