from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.shaping import overlong_penalty, without_truncated


@pytest.mark.parametrize(
    ("length", "expected"),
    # The paper's numbers: 20,480 tokens, of which the last 4,096 are the buffer; it begins after 16,384.
    [
        (0, 0.0),
        (16_384, 0.0),
        (16_385, -1 / 4096),
        (17_408, -0.25),  # 1,024 of 4,096
        (18_432, -0.5),
        (20_479, -4095 / 4096),
        (20_480, -1.0),
        (20_481, -1.0),
        (99_999, -1.0),
    ],
)
def test_the_papers_numbers(length: int, expected: float) -> None:
    assert overlong_penalty(length, 20_480, 4_096) == pytest.approx(expected, rel=1e-12)
    assert overlong_penalty(length, 20_480, 4_096, factor=0.5) == pytest.approx(expected / 2, rel=1e-12)


def test_a_buffer_may_be_all_or_nothing() -> None:
    assert [overlong_penalty(length, 4, 4) for length in range(6)] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    assert [overlong_penalty(length, 4, 0) for length in range(5)] == [0.0] * 5


@given(st.integers(1, 500), st.integers(0, 600), st.floats(0.0, 10.0), st.data())
def test_longer_is_never_better(max_length: int, length: int, factor: float, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, max_length))
    here, next_one = (overlong_penalty(n, max_length, buffer, factor) for n in (length, length + 1))
    assert -factor <= next_one <= here <= 0
    # Between two lengths of the buffer it sinks by factor / buffer.
    if max_length - buffer <= length < max_length:
        assert here - next_one == pytest.approx(factor / buffer, abs=1e-9)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="length=-1"):
        overlong_penalty(-1, 4, 2)
    with pytest.raises(ValueError, match=r"factor=-0\.5"):
        overlong_penalty(1, 4, 2, -0.5)
    for buffer in (-1, 5):
        with pytest.raises(ValueError, match=f"buffer={buffer}, max_length=4"):
            overlong_penalty(1, 4, buffer)


def test_only_what_was_cut_is_left_out() -> None:
    mask = np.array([True, False, True])
    assert without_truncated(mask, "length").tolist() == [False] * 3
    assert without_truncated(mask, "length").dtype == np.bool_
    for reason in ("stop", "abort"):
        assert without_truncated(mask, reason).tolist() == [True, False, True]  # type: ignore[arg-type]
    assert mask.tolist() == [True, False, True]
