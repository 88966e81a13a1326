"""The shipped quickstarts, whole, and their task with each preset of configs/algorithms: greedy validation goes from
under 0.2 to over a stated score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow

CONFIGS = runs.ROOT / "configs"
VALIDATION = "val-aux/all/reward/mean"


@dataclass(frozen=True)
class Learns:
    """A preset over a quickstart. docs/algorithms.md, Learning, has the same settings and the scores they reached."""

    preset: str
    settings: tuple[str, ...]
    score: float
    """The best validation of the run passes this."""
    shown_by: tuple[str, ...]
    """Metrics of what the preset brings along: each differs from 0 in some step."""
    base: str = "quickstart_grpo"


ONE_ANSWER = ("rollout.n=1", "data.prompts_per_step=512", "actor.batch.mini_batch_prompts=128")
"""As many answers as with 64 prompts of 8, each to a prompt of its own."""
# Advantages that are not divided by the scores' deviation, about 0.2 at first, want so much less of an entropy bonus.
LESS_ENTROPY = "actor.entropy_coef=0.04"

PRESETS = (
    Learns("ppo", (), 0.9, ("critic/vf_loss", "actor/pg_clipfrac"), base="quickstart"),
    Learns("grpo", (), 0.9, ("actor/kl_loss", "actor/pg_clipfrac")),
    Learns("dr_grpo", (LESS_ENTROPY,), 0.85, ("actor/pg_clipfrac",)),
    Learns(
        "dapo",
        (
            "run.total_steps=50",
            "rollout.n=16",
            "data.prompts_per_step=32",
            "actor.batch.mini_batch_prompts=8",
            # A right answer has two tokens, its digit and the end; one of three loses half a point.
            "data.max_response_length=3",
            "reward.overlong_buffer=1",
            "reward.overlong_factor=0.5",
            "actor.entropy_coef=0.3",
            "rollout.max_refills=4",
        ),
        0.9,
        ("rollout/refills", "rollout/equal_groups", "reward/overlong_penalty", "actor/pg_clipfrac"),
    ),
    Learns("rloo", (LESS_ENTROPY,), 0.9, ("actor/pg_clipfrac",)),
    Learns("reinforce_pp", ONE_ANSWER, 0.9, ("actor/reward_kl_penalty", "actor/pg_clipfrac")),
    # No score is below 0: only one that is less than the greedy answer's gives an advantage below it.
    Learns(
        "remax",
        (*ONE_ANSWER, "actor.entropy_coef=0.045", "actor.optimizer.lr=1.5e-3"),
        0.85,
        ("critic/advantages/min", "actor/pg_clipfrac"),
    ),
    Learns("gspo", (), 0.9, ("actor/pg_clipfrac",)),
    Learns("cispo", (), 0.9, ("actor/pg_clipfrac",)),
)


@pytest.mark.parametrize("name", ["quickstart", "quickstart_grpo"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.timeout(400)
def test_the_quickstart_learns(name: str, seed: int, tmp_path: Path) -> None:
    runs.train(str(CONFIGS / f"{name}.yaml"), f"run.dir={tmp_path}", f"run.seed={seed}", deadline=380)
    found = runs.metrics(tmp_path)
    assert found[0][VALIDATION] < 0.2
    assert found[max(found)][VALIDATION] > 0.8


@pytest.mark.parametrize("case", PRESETS, ids=lambda case: case.preset)
@pytest.mark.timeout(400)
def test_a_preset_learns_the_task_of_the_quickstart(case: Learns, tmp_path: Path) -> None:
    files = (CONFIGS / f"{case.base}.yaml", CONFIGS / "algorithms" / f"{case.preset}.yaml")
    runs.train(*map(str, files), f"run.dir={tmp_path}", *case.settings, deadline=380)
    found = runs.metrics(tmp_path)
    scores = {step: entry[VALIDATION] for step, entry in found.items() if VALIDATION in entry}
    assert scores[0] < 0.2
    assert max(scores.values()) > case.score, scores
    for metric in case.shown_by:
        assert any(entry[metric] for step, entry in found.items() if step > 0), metric


def test_every_preset_has_a_case() -> None:
    assert {case.preset for case in PRESETS} == {path.stem for path in (CONFIGS / "algorithms").glob("*.yaml")}
