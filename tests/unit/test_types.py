"""What the driver keeps of a sample."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.types import Activity, Sample, SampleInfo


def test_the_scalars_of_a_sample() -> None:
    """Three prompt tokens, four response tokens of which a tool wrote one; two weight versions wrote the rest."""
    sample = Sample(
        uid="0-1/2",
        group="0-1",
        prompt_ids=np.array([5, 6, 7]),
        response_ids=np.array([8, 9, 1, 2]),
        rollout_logprobs=np.zeros(4, np.float32),
        loss_mask=np.array([True, False, True, True]),
        weight_versions=np.array([4, 4, 3, 5]),
        score=0.5,
        finish_reason="length",
        data_source="s",
        reward_error="why",
    )
    expected = SampleInfo("0-1/2", "0-1", 3, 4, 3, 0.5, "length", "s", 3, "why")
    assert SampleInfo.of(sample) == expected
    assert (sample.length, expected.length) == (7, 7)


def test_activities_add_up_by_their_looks() -> None:
    """One look at 4 running and three at 8 are 7 in the mean; nothing waiting and 2 are 1.5."""
    both = Activity(1, 4.0, 9.0, 0.0, 1.0, 0.5) + Activity(3, 8.0, 8.0, 2.0, 3.0, 0.25)
    assert both == Activity(4, 7.0, 9.0, 1.5, 3.0, 0.5)
    assert Activity() + Activity() == Activity()
    assert Activity() + both == both


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4), max_size=5))
def test_the_sum_of_stretches_is_that_of_all_their_looks(stretches: list[list[tuple[int, int]]]) -> None:
    def of(looks: list[tuple[int, int]]) -> Activity:
        if not looks:
            return Activity()
        running, waiting = zip(*looks, strict=True)
        n = len(looks)
        return Activity(n, sum(running) / n, max(running), sum(waiting) / n, max(waiting), max(running) / 9)

    found, expected = reduce(add, map(of, stretches), Activity()), of([look for looks in stretches for look in looks])
    assert found.num_looks == expected.num_looks
    assert (found.max_running, found.max_waiting) == (expected.max_running, expected.max_waiting)
    assert found.num_running == pytest.approx(expected.num_running)
    assert found.num_waiting == pytest.approx(expected.num_waiting)
    assert found.max_cache_use == pytest.approx(expected.max_cache_use)
