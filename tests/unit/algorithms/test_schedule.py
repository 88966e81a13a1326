from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.schedule import SCHEDULES, learning_rate


@pytest.mark.parametrize(
    ("kind", "expected"),
    # base 1.0, min_lr 0.2, warm-up of 2 steps, total 6: progress is 0, 1/4, 1/2, 3/4, 1 at steps 2 to 6.
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        # 0.2 + 0.8 * (1 + cos(pi/4)) / 2 = 0.2 + 0.4 * 1.7071068 = 0.8828427; 0.2 + 0.4 * 0.2928932 = 0.3171573
        ("cosine", [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2]),
    ],
)
def test_worked_by_hand(kind: str, expected: list[float]) -> None:
    rates = [learning_rate(step, 1.0, 0.2, warmup_steps=2, total_steps=6, kind=kind) for step in range(8)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("kind", SCHEDULES)
@given(
    base=st.floats(1e-8, 1.0),
    fraction=st.floats(0.0, 1.0),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 50),
)
def test_rises_then_never_rises_again_and_stays_in_bounds(
    kind: str, base: float, fraction: float, warmup: int, decay: int
) -> None:
    min_lr = fraction * base
    rates = [learning_rate(s, base, min_lr, warmup, warmup + decay, kind) for s in range(warmup + decay + 3)]
    slack = 1e-12 * base
    assert rates[0] > 0 or (warmup == 0 and min_lr == 0)
    assert all(b >= a - slack for a, b in pairwise(rates[: warmup + 1]))
    assert all(b <= a + slack for a, b in pairwise(rates[warmup:]))
    assert rates[warmup] == pytest.approx(base)
    assert all(rate <= base + slack for rate in rates)
    if kind != "constant":
        assert rates[-1] == pytest.approx(min_lr, abs=slack)
        assert all(rate >= min_lr - slack for rate in rates[warmup:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cosinus"}, "constant, linear, cosine"),
        ({"step": -1}, "step=-1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_lr": 2.0}, "min_lr=2.0, base=1.0"),
        ({"total_steps": 2}, "total_steps=2 is not above warmup_steps=2"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"step": 0, "base": 1.0, "min_lr": 0.0, "warmup_steps": 2, "total_steps": 6, "kind": "linear"}
    with pytest.raises(ValueError, match=message):
        learning_rate(**(arguments | change))  # type: ignore[arg-type]


def test_constant_needs_neither_a_floor_nor_an_end() -> None:
    assert learning_rate(100, 1e-6, min_lr=1.0, warmup_steps=0, total_steps=0, kind="constant") == 1e-6
