"""A whole run whose answers a reward model scores: what is learned from is the sum of its scores and the rule's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import runs
from tests.reward_models import write_reward_model

pytestmark = pytest.mark.slow

SHORT = (
    str(runs.ROOT / "configs" / "quickstart_grpo.yaml"),
    "run.total_steps=2",
    "run.save_model=false",
    "run.save_at_end=false",
    "run.validate_before_training=false",
    "run.validate_every=0",
    "data.prompts_per_step=16",
    "data.create.num_train=64",
    "data.create.num_validation=8",
    "reward_model.max_length=64",
    "reward_model.offload.parameters=true",
)


def steps(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    output = runs.train(*SHORT, f"run.dir={folder}", *arguments)
    assert "reward_model: 0.0" in output, output
    found = runs.metrics(folder)
    return [found[1], found[2]]


def test_without_the_rule_a_model_that_likes_all_answers_alike_teaches_nothing(tmp_path: Path) -> None:
    """Groups are compared on the driver: its head is zero, so every score is, whatever the rule says."""
    write_reward_model(tmp_path / "model", head=0.0)
    own = (f"reward_model.path={tmp_path / 'model'}", "reward_model.rule_weight=0", "reward_model.parallel.tensor=2")
    for entry in steps(tmp_path / "run", *own):
        for name in ("reward_model/score", "critic/score", "critic/rewards", "critic/advantages"):
            assert (entry[f"{name}/min"], entry[f"{name}/max"]) == (0.0, 0.0), name
        assert 0 < entry["reward/rule/mean"] < entry["reward/rule/max"]


def test_each_tokens_reward_is_made_of_the_weighted_sum(tmp_path: Path) -> None:
    """REINFORCE++ takes the score on the actor's ranks: with gamma 1 and no whitening the advantage of every token of
    an answer is its score, so both have the same extremes."""
    write_reward_model(tmp_path / "model", head=0.2)
    own = (
        f"reward_model.path={tmp_path / 'model'}",
        "reward_model.weight=2",
        "reward_model.rule_weight=0.5",
        "reward_model.parallel.pipeline=2",
        "algorithm.advantage=reinforce_pp",
        "algorithm.whiten_advantages=false",
    )
    for entry in steps(tmp_path / "run", *own):
        combined = 0.5 * entry["reward/rule/mean"] + 2 * entry["reward_model/score/mean"]
        assert entry["critic/score/mean"] == pytest.approx(combined, rel=1e-5)
        assert entry["reward_model/score/max"] - entry["reward_model/score/min"] > 0.1
        for kind in ("mean", "min", "max"):
            assert entry[f"critic/rewards/{kind}"] == pytest.approx(entry[f"critic/score/{kind}"], rel=1e-5)
        for kind in ("min", "max"):
            assert entry[f"critic/advantages/{kind}"] == pytest.approx(entry[f"critic/score/{kind}"], rel=1e-5)
        assert entry["reward_model/truncated"] == 0
