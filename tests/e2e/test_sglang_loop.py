"""The loop with real SGLang on the CPU: the same driver, plan and sync as on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.sglang


def test_two_steps_with_sglang_agree_with_megatron(tmp_path: Path) -> None:
    """Weights change between the syncs; after each, SGLang's log-probs of what it sampled are Megatron's."""
    runs.train(
        str(runs.QUICKSTART),
        "run.total_steps=2",
        "run.validate_before_training=false",
        "run.save_model=false",
        "rollout.engine=sglang",
        "rollout.sglang.max_running_requests=64",
        "data.prompts_per_step=128",
        "actor.batch.mini_batch_prompts=64",
        "critic.batch.mini_batch_prompts=64",
        f"run.dir={tmp_path}",
    )
    found = runs.metrics(tmp_path)
    assert sorted(found) == [1, 2]
    for step, entry in found.items():
        assert entry["training/rollout_logprobs_abs_diff_mean"] < 1e-4, step
        assert entry["actor/skipped_updates"] == 0
