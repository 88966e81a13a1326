from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import Moments
from megarl.algorithms.diagnostics import Mismatch, explained_variance, mismatch

T, F = True, False


def explained(returns: list[float], values: list[float]) -> float:
    r, v = torch.tensor(returns, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    mask = torch.ones(len(returns), dtype=torch.bool)
    return explained_variance(Moments.of(r, mask), Moments.of(r - v, mask))


def test_explained_variance_worked_by_hand() -> None:
    # returns 0, 2, 4: variance 4. Residuals with values 0, 1, 4: 0, 1, 0: mean 1/3, variance (1 - 1/3) / 2 = 1/3.
    # 1 - (1/3) / 4.00001 = 0.9166669
    assert explained([0.0, 2.0, 4.0], [0.0, 1.0, 4.0]) == pytest.approx(0.9166669, abs=1e-7)
    assert explained([0.0, 2.0, 4.0], [0.0, 2.0, 4.0]) == 1.0
    assert explained([0.0, 2.0, 4.0], [7.0, 7.0, 7.0]) == pytest.approx(0.0, abs=1e-5)  # a constant explains nothing
    assert explained([0.0, 2.0, 4.0], [4.0, 2.0, 0.0]) == pytest.approx(-3.0, abs=1e-4)  # residuals -4, 0, 4: 16 / 4


def test_explained_variance_of_constant_returns_is_finite() -> None:
    # 1 - var(0, 1) / 1e-5 = 1 - 0.5 / 1e-5
    assert explained([1.0, 1.0], [1.0, 0.0]) == pytest.approx(-49999.0)


def test_explained_variance_needs_two_tokens_and_the_same_ones() -> None:
    assert math.isnan(explained([1.0], [1.0]))
    with pytest.raises(ValueError, match="3 returns but of 2 residuals"):
        explained_variance(Moments(3, 0.0, 1.0), Moments(2, 0.0, 1.0))


def test_mismatch_worked_by_hand() -> None:
    # Probabilities 0.5 and 0.25, 0.5 and 1, 0.25 and 0.25: differences 0.25, 0.5, 0: mean 0.25, variance 0.125 / 2.
    rollout, trainer = torch.tensor([0.5, 0.5, 1.0, 0.25]), torch.tensor([0.25, 1.0, 0.001, 0.25])
    result = mismatch(rollout.log(), trainer.log(), torch.tensor([T, T, F, T]))
    assert result.max == 0.5
    assert result.mean == pytest.approx(0.25)
    assert result.std == pytest.approx(0.25)


def test_mismatch_of_nothing_is_nothing() -> None:
    nothing = mismatch(torch.tensor([math.nan]), torch.tensor([0.0]), torch.tensor([F]))
    assert nothing == Mismatch(Moments(0, 0.0, 0.0), 0.0)
    assert (nothing.mean, nothing.std) == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(-5.0, 0.0), st.floats(-5.0, 0.0), st.booleans()), max_size=20), st.integers(0, 20))
def test_mismatches_of_two_ranks_add(tokens: list[tuple[float, float, bool]], cut: int) -> None:
    rollout = torch.tensor([a for a, _, _ in tokens])
    trainer = torch.tensor([b for _, b, _ in tokens])
    mask = torch.tensor([m for _, _, m in tokens], dtype=torch.bool)
    whole = mismatch(rollout, trainer, mask)
    added = mismatch(rollout[:cut], trainer[:cut], mask[:cut]) + mismatch(rollout[cut:], trainer[cut:], mask[cut:])
    assert added.max == whole.max
    assert added.mean == pytest.approx(whole.mean, abs=1e-12)
    assert added.std == pytest.approx(whole.std, abs=1e-6)
    difference = (rollout.exp() - trainer.exp()).abs()[mask]
    if len(difference):
        assert whole.max == float(difference.max())
        assert whole.mean == pytest.approx(float(difference.mean()), abs=1e-6)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and logprobs \(3,\)"):
        mismatch(torch.zeros(2), torch.zeros(3), torch.tensor([T, T]))
    with pytest.raises(ValueError, match="must be bool"):
        mismatch(torch.zeros(2), torch.zeros(2), torch.ones(2))
