"""The difference between the rollout engine's log-probs and the trainer's, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.engines.rollout_mismatch import rollout_mismatch
from megarl.types import FloatArray, Sample


def sample(probabilities: list[float], mask: list[bool]) -> Sample:
    length = len(mask)
    return Sample(
        uid="u",
        group="g",
        prompt_ids=np.array([1]),
        response_ids=np.zeros(length, np.int64),
        rollout_logprobs=logs(probabilities),
        loss_mask=np.array(mask),
        weight_versions=np.zeros(length, np.int64),
        score=0.0,
        finish_reason="stop",
        data_source="s",
    )


def logs(probabilities: list[float]) -> FloatArray:
    return np.log(np.array(probabilities, np.float32))


def test_probabilities_and_log_probs_by_hand() -> None:
    """Loss tokens: 0.5 against 0.25, 0.5 against 0.5, 0.25 against 0.5; the fourth is a tool's."""
    samples = [sample([0.5, 0.9], [True, False]), sample([0.5, 0.25], [True, True])]
    probabilities, logprobs = rollout_mismatch(samples, [logs([0.25, 0.1]), logs([0.5, 0.5])])
    assert probabilities.mean == pytest.approx(0.5 / 3)
    assert probabilities.max == pytest.approx(0.25)
    assert probabilities.std == pytest.approx(math.sqrt((0.125 - 0.25 / 3) / 2))
    assert (logprobs.count, logprobs.max, logprobs.min) == (3, pytest.approx(math.log(2)), 0.0)
    assert logprobs.total == pytest.approx(2 * math.log(2))


def test_a_rank_without_samples_adds_nothing() -> None:
    own = rollout_mismatch([sample([0.5], [True])], [logs([0.25])])
    none = rollout_mismatch([], [])
    assert own[0] + none[0] == own[0]
    assert own[1] + none[1] == own[1]
    assert none[0].mean == 0.0
