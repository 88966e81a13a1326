"""Balancing and scheduling: what the docstrings promise, on numbers worked by hand and on any lengths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.schedule import (
    _split_further,
    balance,
    micro_batches,
    micro_batches_of_size,
    padded_length,
    schedule_forward,
    schedule_step,
    sequence_cost,
)

costs_lists = st.lists(st.integers(0, 1000), max_size=40)
length_lists = st.lists(st.integers(1, 64), max_size=40)


def sums(costs, bins):
    return [sum(costs[index] for index in indices) for indices in bins]


def flat(bins):
    return sorted(index for indices in bins for index in indices)


def test_sequence_cost_is_linear_plus_causal_attention():
    # 12 * 64 * 100 + 100 * 100
    assert sequence_cost(100, 64) == 86_800
    # At L = 12 H both parts are equal.
    assert sequence_cost(768, 64) == 2 * 768 * 768


def test_balance_of_the_textbook_example():
    # {8, 7, 6, 5, 4} over two: 8-7 -> 1, 6-5 -> 1, 4-1 -> 3, 3-1 -> 2: sums 16 and 14.
    bins = balance([8, 7, 6, 5, 4], 2)
    assert sums([8, 7, 6, 5, 4], bins) == [16, 14]


def test_balance_finds_the_even_split_that_largest_first_finds():
    assert sorted(sums([4, 4, 2, 2], balance([4, 4, 2, 2], 2))) == [6, 6]


def test_balance_with_equal_counts_puts_the_small_with_the_large():
    assert balance([10, 1, 9, 2], 2, equal_counts=True) == [[0, 1], [2, 3]]
    # Without it the two large ones still part, but counts are free.
    assert balance([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert [len(indices) for indices in balance([9, 1, 1, 1], 2, equal_counts=True)] == [2, 2]


def test_balance_does_not_leave_a_bin_empty_for_costs_of_zero():
    assert balance([5, 0, 0], 3) == [[0], [1], [2]]
    assert all(balance([0, 0, 0, 0], 4))


def test_balance_with_fewer_costs_than_bins_leaves_the_last_empty():
    assert balance([3, 7], 4) == [[1], [0], [], []]
    assert balance([], 2) == [[], []]


@given(costs_lists, st.integers(1, 8))
def test_balance_is_a_partition_within_its_bound(costs, num_bins):
    bins = balance(costs, num_bins)
    assert len(bins) == num_bins
    assert flat(bins) == list(range(len(costs)))
    assert all(indices == sorted(indices) for indices in bins)
    totals = sums(costs, bins)
    assert totals == sorted(totals, reverse=True)
    assert max(totals) - min(totals) <= max(costs, default=0)
    assert all(bins) or len(costs) < num_bins
    assert balance(costs, num_bins) == bins


@given(costs_lists, st.integers(1, 8))
def test_balance_with_equal_counts_keeps_counts_within_one(costs, num_bins):
    bins = balance(costs, num_bins, equal_counts=True)
    assert flat(bins) == list(range(len(costs)))
    counts = [len(indices) for indices in bins]
    assert max(counts) - min(counts) <= (1 if len(costs) % num_bins else 0)
    totals = sums(costs, bins)
    assert max(totals) - min(totals) <= max(costs, default=0)
    if costs and len(costs) % num_bins == 0:
        assert max(totals) - min(totals) <= max(costs) - min(costs)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_balance_over_two_is_within_seven_sixths_of_the_best(costs):
    total = sum(costs)
    best = min(
        max(part, total - part)
        for r in range(len(costs) + 1)
        for chosen in itertools.combinations(costs, r)
        for part in [sum(chosen)]
    )
    # Fischetti and Martello (1987): the differencing method is within 7/6 of the optimum for two bins.
    assert max(sums(costs, balance(costs, 2))) * 6 <= best * 7


@pytest.mark.parametrize(
    ("costs", "num_bins", "message"),
    [([1.0], 0, "0 bins"), ([1.0, -2.0], 2, r"cost 1 is -2\.0"), ([float("nan")], 2, "cost 0 is nan")],
)
def test_balance_refuses_what_it_cannot_balance(costs, num_bins, message):
    with pytest.raises(ValueError, match=message):
        balance(costs, num_bins)


def test_micro_batches_fill_up_to_the_limit():
    # Padded to 4: 8, 8, 4, 4, with a limit of 12: two of 12.
    assert micro_batches([7, 8, 1, 4], max_tokens=12, multiple=4) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])


def test_micro_batches_count_padding_against_the_limit():
    # Two of 5 are 10 tokens, but 16 when padded to 8.
    assert len(micro_batches([5, 5], max_tokens=15, multiple=1)) == 1
    assert len(micro_batches([5, 5], max_tokens=15, multiple=8)) == 2


def test_micro_batches_where_only_first_fit_fits():
    # 6 + 4, 5 + 5, 7 + 3 fill three of 10 exactly; every other split needs more.
    lengths = [6, 4, 5, 5, 7, 3]
    assert sorted(sums(lengths, micro_batches(lengths, max_tokens=10))) == [10, 10, 10]


def test_micro_batches_where_balancing_goes_over_the_limit():
    # The differencing method makes 10 and 7 of these; first-fit-decreasing makes 9 and 8.
    lengths = [3, 4, 3, 3, 4]
    assert sums(lengths, balance(lengths, 2)) == [10, 7]
    assert micro_batches(lengths, max_tokens=9) == [[0, 2, 3], [1, 4]]


def test_splitting_further_halves_the_largest_bin_that_can_be_halved():
    padded = [9, 1, 2, 3]
    assert sorted(_split_further([[0], [1, 2, 3]], padded, 3)) == [[0], [1, 2], [3]]
    assert _split_further([[0], [1, 2, 3]], padded, 2) == [[0], [1, 2, 3]]
    four_and_two = _split_further([[0], [1, 2, 3]], padded, 6)
    assert sorted(four_and_two[:4]) == [[0], [1], [2], [3]]
    assert four_and_two[4:] == [[], []]


def test_micro_batches_come_largest_first():
    lengths = [1, 9, 5, 5]
    bins = micro_batches(lengths, max_tokens=10, min_count=3)
    assert sums(lengths, bins) == sorted(sums(lengths, bins), reverse=True)
    assert len(bins) == 3


def test_micro_batches_are_exactly_as_many_as_asked_and_empty_ones_are_last():
    assert micro_batches([3, 5], max_tokens=8, min_count=4) == [[1], [0], [], []]
    assert micro_batches([3, 5], max_tokens=8, count_multiple=3) == [[1], [0], []]
    assert micro_batches([], max_tokens=8) == []
    assert micro_batches([], max_tokens=8, min_count=2) == [[], []]


def test_a_sample_over_the_limit_is_named_with_the_key():
    with pytest.raises(
        ValueError,
        match=r"sample 1 has 17 tokens, 20 when padded to a multiple of 4.*16.*raise max_tokens_per_gpu to 20",
    ):
        micro_batches([4, 17], max_tokens=16, multiple=4)
    with pytest.raises(ValueError, match="forward_max_tokens_per_gpu"):
        schedule_forward([[0]], [17], max_tokens=16)


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 0 tokens"):
        micro_batches([4, 0], max_tokens=16)


@given(length_lists, st.integers(64, 200), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(0, 12))
def test_micro_batches_keep_their_promises(lengths, max_tokens, multiple, count_multiple, min_count):
    bins = micro_batches(lengths, max_tokens, multiple, count_multiple, min_count)
    padded = [padded_length(length, multiple) for length in lengths]
    assert flat(bins) == list(range(len(lengths)))
    assert all(total <= max_tokens for total in sums(padded, bins))
    assert all(bins) or len(lengths) < len(bins)
    assert sums(padded, bins) == sorted(sums(padded, bins), reverse=True)
    needed = len(micro_batches(lengths, max_tokens, multiple))
    assert len(bins) == padded_length(max(needed, min_count), count_multiple)
    assert needed >= -(-sum(padded) // max_tokens)
    # No two neighbours in size could be one, in the first-fit sense: more than half full on average.
    assert needed <= 1 or sum(padded) * 2 > max_tokens * (needed - 1)


@given(length_lists, st.integers(1, 6), st.integers(1, 4), st.integers(0, 12))
def test_static_micro_batches_keep_their_promises(lengths, micro_batch_size, count_multiple, min_count):
    bins = micro_batches_of_size(lengths, micro_batch_size, count_multiple, min_count)
    assert flat(bins) == list(range(len(lengths)))
    counts = [len(indices) for indices in bins]
    assert all(count <= micro_batch_size for count in counts)
    assert not counts or max(counts) - min(counts) <= 1
    assert len(bins) == padded_length(max(-(-len(lengths) // micro_batch_size), min_count), count_multiple)


def test_static_micro_batches_are_full_when_the_size_divides_the_samples():
    assert [len(indices) for indices in micro_batches_of_size([5, 1, 9, 2, 2, 7], 2)] == [2, 2, 2]
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        micro_batches_of_size([1], 0)


def test_schedule_of_eight_samples_by_hand():
    # Two answers a prompt, two prompts a mini-batch, two ranks; costs with H = 1: L * (12 + L).
    lengths = [10, 2, 2, 10, 4, 4, 4, 4]
    schedule = schedule_step(
        lengths,
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        mini_batch_prompts=2,
        num_data_parallel=2,
        hidden_size=1,
        max_tokens=12,
    )
    first, second = schedule.mini_batches
    assert [sorted(lengths[i] for bins in rank for i in bins) for rank in first] == [[2, 10], [2, 10]]
    assert [[len(bins) for bins in rank] for rank in second] == [[2], [2]]
    assert schedule.num_micro_batches == [1, 1]
    assert flat(schedule.assignment) == list(range(8))
    assert [len(indices) for indices in schedule.assignment] == [4, 4]


def test_the_heavier_half_goes_to_the_rank_that_did_less():
    # Each mini-batch of one prompt has a long and a short answer; ranks must take turns.
    schedule = schedule_step(
        [9, 1, 9, 1], [[0, 1], [2, 3]], mini_batch_prompts=1, num_data_parallel=2, hidden_size=8, max_tokens=9
    )
    assert schedule.assignment == [[0, 3], [1, 2]]


def test_groups_stay_together_in_the_order_given_and_the_last_mini_batch_takes_the_rest():
    schedule = schedule_step(
        [1] * 6, [[4, 5], [0, 1], [2, 3]], mini_batch_prompts=2, num_data_parallel=1, hidden_size=8, max_tokens=8
    )
    assert [flat(ranks[0]) for ranks in schedule.mini_batches] == [[0, 1, 4, 5], [2, 3]]


def test_a_rank_without_samples_gets_empty_micro_batches():
    schedule = schedule_step([4], [[0]], mini_batch_prompts=1, num_data_parallel=2, hidden_size=8, max_tokens=8)
    assert schedule.mini_batches == [[[[0]], [[]]]]


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=10))
    order = draw(st.permutations(range(sum(sizes))))
    ends = list(itertools.accumulate(sizes))
    groups = [list(order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    lengths = draw(st.lists(st.integers(1, 64), min_size=sum(sizes), max_size=sum(sizes)))
    return lengths, groups


@given(
    steps(),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([{"max_tokens": 64}, {"max_tokens": 150}, {"micro_batch_size": 1}, {"micro_batch_size": 3}]),
    st.sampled_from([1, 4]),
    st.integers(1, 3),
)
def test_schedules_keep_their_promises(step, mini_batch_prompts, num_ranks, limit, multiple, count_multiple):
    lengths, groups = step
    schedule = schedule_step(
        lengths,
        groups,
        mini_batch_prompts=mini_batch_prompts,
        num_data_parallel=num_ranks,
        hidden_size=4,
        multiple=multiple,
        count_multiple=count_multiple,
        **limit,
    )
    totals = [0] * num_ranks
    worst = max(sequence_cost(length, 4) for length in lengths)
    assert len(schedule.mini_batches) == -(-len(groups) // mini_batch_prompts)
    for number, ranks in enumerate(schedule.mini_batches):
        chosen = groups[number * mini_batch_prompts : (number + 1) * mini_batch_prompts]
        assert flat(indices for rank in ranks for indices in rank) == sorted(i for group in chosen for i in group)
        assert len(ranks) == num_ranks
        assert {len(rank) for rank in ranks} == {schedule.num_micro_batches[number]}
        assert schedule.num_micro_batches[number] % count_multiple == 0
        assert_within_limit(ranks, lengths, multiple, limit)
        assert all(indices == sorted(indices) for rank in ranks for indices in rank)
        counts = [sum(map(len, rank)) for rank in ranks]
        assert "max_tokens" in limit or max(counts) - min(counts) <= 1
        assert all(counts) or sum(counts) < num_ranks
        costs = [sum(sequence_cost(lengths[i], 4) for indices in rank for i in indices) for rank in ranks]
        assert max(costs) - min(costs) <= worst
        totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
    assert max(totals) - min(totals) <= worst
    assert flat(schedule.assignment) == list(range(len(lengths)))

    forward = schedule_forward(schedule.assignment, lengths, multiple=multiple, count_multiple=count_multiple, **limit)
    assert [flat(rank) for rank in forward] == schedule.assignment
    assert len({len(rank) for rank in forward}) == 1
    assert len(forward[0]) % count_multiple == 0
    assert_within_limit(forward, lengths, multiple, limit)


def assert_within_limit(ranks, lengths, multiple, limit):
    for rank in ranks:
        num_samples = sum(map(len, rank))
        for indices in rank:
            assert indices or num_samples < len(rank)
            assert len(indices) <= limit.get("micro_batch_size", len(indices))
            tokens = sum(padded_length(lengths[i], multiple) for i in indices)
            assert tokens <= limit.get("max_tokens", tokens)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [1]], "sample 1 is in group 0 and in group 1"),
        ([[0], [2]], "group 1 names sample 2, but there are 2 samples"),
        ([[1]], "1 of 2 samples are in no group, the first is sample 0"),
    ],
)
def test_groups_that_are_no_partition_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        schedule_step([3, 3], groups, mini_batch_prompts=1, num_data_parallel=1, hidden_size=4, max_tokens=8)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 8, "micro_batch_size": 1}])
def test_exactly_one_limit_is_given(limit):
    with pytest.raises(ValueError, match="give one"):
        schedule_step([3], [[0]], mini_batch_prompts=1, num_data_parallel=1, hidden_size=4, **limit)
