from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.entropy import AdaptiveEntropyController, FixedEntropyController, update

ADAPTIVE = AdaptiveEntropyController(coef=0.02, target=0.2, step=0.005)


@pytest.mark.parametrize(
    ("entropy", "coef_after", "bonus"),
    [
        (0.1, 0.025, 0.02),  # below: grows, and is on
        (0.2, 0.02, 0.02),  # at the target: stays, and is on
        (0.3, 0.015, 0.0),  # above: sinks, and is off
        (0.0, 0.025, 0.02),
        (math.nan, 0.02, 0.0),
    ],
)
def test_the_coefficient_grows_below_the_target_and_is_in_force_only_there(
    entropy: float, coef_after: float, bonus: float
) -> None:
    assert update(ADAPTIVE, entropy).coef == pytest.approx(coef_after)
    assert ADAPTIVE.bonus(entropy) == bonus


def test_a_run_by_hand() -> None:
    """Steps of 0.5 around a target of 1, from 0. Entropies 0.5, 0.5, 2, 2, 2, 1, 0.5: the bonus of each step is the
    coefficient that the steps before it have left, where its entropy is at most 1."""
    controller = AdaptiveEntropyController(coef=0.0, target=1.0, step=0.5)
    bonuses, coefs = [], []
    for entropy in (0.5, 0.5, 2.0, 2.0, 2.0, 1.0, 0.5):
        bonuses.append(controller.bonus(entropy))
        controller = update(controller, entropy)
        coefs.append(controller.coef)
    assert coefs == [0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.5]  # never below 0
    assert bonuses == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


@given(st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.floats(1e-6, 1.0), st.lists(st.floats(0.0, 3.0), max_size=20))
def test_it_moves_by_one_step_at_most_and_is_never_negative(
    coef: float, target: float, step: float, entropies: list[float]
) -> None:
    controller = AdaptiveEntropyController(coef, target, step)
    for entropy in entropies:
        after = update(controller, entropy)
        assert after.coef >= 0
        assert abs(after.coef - controller.coef) <= step * (1 + 1e-9)
        assert (after.coef > controller.coef) == (entropy < target)
        assert (after.target, after.step) == (target, step)
        controller = after


def test_a_fixed_coefficient_stays_and_asks_for_no_entropy() -> None:
    for coef in (0.1, 0.0, -0.1):
        fixed = FixedEntropyController(coef)
        assert [fixed.bonus(entropy) for entropy in (None, 0.0, 9.0)] == [coef] * 3
        assert update(fixed, 0.0) == update(fixed, None) == fixed


def test_what_is_not_known_steers_nothing() -> None:
    assert update(ADAPTIVE, None) == ADAPTIVE
    with pytest.raises(ValueError, match=r"must be known to be steered to 0\.2"):
        ADAPTIVE.bonus(None)


@pytest.mark.parametrize(("coef", "target", "step"), [(-0.1, 0.2, 0.1), (0.0, -0.2, 0.1), (0.0, 0.2, 0.0)])
def test_senseless_numbers_are_refused(coef: float, target: float, step: float) -> None:
    with pytest.raises(ValueError, match=f"coef={coef}, target={target}, step={step}"):
        AdaptiveEntropyController(coef, target, step)
