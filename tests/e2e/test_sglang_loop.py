"""The loop with real SGLang on the CPU: the same driver, plan and sync as on a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import psutil
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


def processes_of(log: Path) -> list[psutil.Process]:
    """The replica's schedulers, whose output goes into this log."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log) and "scheduler" in " ".join(process.cmdline()):
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def test_a_replica_whose_scheduler_is_killed_while_it_generates_is_replaced(tmp_path: Path) -> None:
    """One of two. The step ends with every sample once, of this step's weights, with Megatron's log-probs; the prompts
    of the dead replica are run again, on both."""
    log = tmp_path / "logs" / "sglang_1.log"
    killed: list[psutil.Process] = []

    def kill() -> None:
        while log.read_text().count("Prefill batch") < 3:
            time.sleep(0.02)
        killed.extend(processes_of(log))
        for process in killed:
            process.kill()

    def watch(process: subprocess.Popen[str], line: str) -> None:
        if "weight sync: " in line:
            threading.Thread(target=kill, daemon=True).start()

    output = runs.train(
        str(runs.QUICKSTART),
        "run.total_steps=1",
        "run.validate_before_training=false",
        "run.save_model=false",
        "data.create.num_validation=2",
        "data.max_response_length=16",
        "rollout.engine=sglang",
        "rollout.sglang.max_running_requests=8",
        "data.prompts_per_step=256",
        f"run.dir={tmp_path}",
        watch=watch,
        module="tests.e2e.recording",
    )
    assert len(killed) == 1
    assert re.search(r"SGLang replica 1 on \S+ died and was replaced in \d+ s \(1 of run.max_replica_restarts", output)
    assert "SIGKILL" in output
    assert f"--- the end of {log}:" in output
    (samples,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    uids = [uid for uid, _ in samples]
    assert len(uids) == len(set(uids)) == 256
    assert {version for _, version in samples} == {0}
    anew = log.read_text().rindex("server_args=")
    assert "Prefill batch" in log.read_text()[anew:]
    entry = runs.metrics(tmp_path)[1]
    assert entry["training/rollout_logprobs_abs_diff_mean"] < 1e-4
    assert entry["actor/skipped_updates"] == 0
