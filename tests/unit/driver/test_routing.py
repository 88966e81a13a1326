"""Every prompt goes to one replica; replicas get about as much to do, or prompts that begin alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.driver.routing import by_prefix, least_loaded

COSTS = st.lists(st.integers(0, 50), max_size=20)
LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def test_the_least_loaded_is_taken_by_hand() -> None:
    """Loads 3 0 1: cost 2 goes to the second (2), 4 to the third (5), 1 to the second (3), 1 to the first of the two
    that have 3 (4), 2 to the second."""
    assert least_loaded([2, 4, 1, 1, 2], [3, 0, 1]) == [[3], [0, 2, 4], [1]]
    assert least_loaded([], [1, 0]) == [[], []]


@given(COSTS, LOADS)
def test_each_prompt_goes_to_one_replica_in_order(costs: list[int], loads: list[int]) -> None:
    shares = least_loaded(costs, loads)
    assert len(shares) == len(loads)
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)


@given(COSTS, LOADS)
def test_no_replica_has_more_to_do_than_another_by_more_than_its_last_prompt(
    costs: list[int], loads: list[int]
) -> None:
    """Greedy: when a replica got its last prompt, none had less to do; and loads only grow."""
    shares = least_loaded(costs, loads)
    totals = [load + sum(costs[n] for n in share) for load, share in zip(loads, shares, strict=True)]
    for share, total in zip(shares, totals, strict=True):
        if share:
            assert total - costs[share[-1]] <= min(totals)


PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=20)


def test_neighbours_by_prefix_are_cut_into_equal_costs_by_hand() -> None:
    """In order: 1 (cost 2), 1 1 (2), 2 (2), 2 2 (4), 2 3 (2): 12 in all, so that each of three takes 4. The middles lie
    at 1, 3 | 5 and 8 | 11: the prompt of cost 4 from 6 to 10 has its middle at the third's beginning."""
    prompts = [np.array(tokens) for tokens in ([2, 3], [1], [2], [2, 2], [1, 1])]
    assert by_prefix(prompts, [2, 2, 2, 4, 2], 3) == [[1, 4], [2], [3, 0]]
    assert by_prefix([], [], 2) == [[], []]
    assert by_prefix(prompts[:2], [0, 0], 2) == [[1, 0], []]


@given(PROMPTS, st.integers(1, 6), st.data())
def test_prompts_that_begin_alike_lie_together(
    prompts: list[list[int]], num_replicas: int, data: st.DataObject
) -> None:
    """A partition; going through the replicas, prompts are in the order of their tokens, so that those with a common
    beginning are never parted by others."""
    costs = data.draw(st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts)))
    shares = by_prefix([np.array(prompt) for prompt in prompts], costs, num_replicas)
    order = [number for share in shares for number in share]
    assert len(shares) == num_replicas
    assert sorted(order) == list(range(len(prompts)))
    assert all(prompts[one] <= prompts[other] for one, other in pairwise(order))


@given(PROMPTS.filter(bool), st.integers(1, 6), st.data())
def test_a_replicas_share_of_neighbours_is_fair_to_within_one_prompt(
    prompts: list[list[int]], num_replicas: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts)))
    shares = by_prefix([np.array(prompt) for prompt in prompts], costs, num_replicas)
    fair = sum(costs) / num_replicas
    for share in shares:
        assert abs(sum(costs[number] for number in share) - fair) <= max(costs) + 1e-9


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_turns_of_one_beginning_meet_in_one_cache(num_replicas: int) -> None:
    """Four families of three prompts, shuffled: each lies on one replica."""
    families = [(family, k) for k in range(3) for family in (3, 1, 2, 0)]
    prompts = [np.array([family, family, k]) for family, k in families]
    shares = by_prefix(prompts, [1] * 12, num_replicas)
    where = {
        family: {r for r, share in enumerate(shares) for n in share if families[n][0] == family} for family in range(4)
    }
    assert all(len(replicas) == 1 for replicas in where.values())
    assert [len(share) for share in shares] == [12 // num_replicas] * num_replicas
