"""Which sample goes to which data-parallel rank, mini-batch and micro-batch. Pure: lengths in, lists of sample indices
out.

Words: a *sample* is one answer with its prompt; a *group* is all the answers to one prompt; a *mini-batch* is one
optimizer step; a *micro-batch* is what one rank sends through the model at once. A sample's *padded length* is its
length rounded up to `multiple`, which is tensor size (with sequence parallel) x 2 x context size (with context
parallel).

Everything here is deterministic: the same arguments give the same schedule on every process and in every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

Bins = list[list[int]]
"""For each bin the indices in it, ascending. An empty list is an empty bin."""


def padded_length(length: int, multiple: int) -> int:
    """`length` tokens rounded up to a multiple of `multiple`. padded_length(5, 4) == 8"""
    return -(-length // multiple) * multiple


def sequence_cost(length: int, hidden_size: int) -> int:
    """Relative time that one layer takes for a sequence of `length` tokens: linear + causal attention.

    A layer with an FFN of 4 x hidden H costs 24 H^2 L FLOPs in its matrices and 2 H L^2 in causal attention (half of
    QK^T and of its product with V); divided by 2 H that is 12 H L + L^2, so that attention weighs as much as the
    matrices at L = 12 H. sequence_cost(100, 64) == 86800. The figure is for comparing sequences: it is no count of
    FLOPs."""
    return length * (12 * hidden_size + length)


def balance(costs: Sequence[float], num_bins: int, equal_counts: bool = False) -> Bins:
    """Partition the indices of `costs` over `num_bins` bins so that the bins' sums are close.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), for k bins: keep partial partitions, join
    the two with the widest spread, the heaviest bins of one to the lightest of the other. Joined so, the spread of the
    union is no more than the wider of the two, hence what is promised:

    * every index is in exactly one bin; a bin's indices are ascending; bins come heaviest first;
    * max(sums) - min(sums) <= max(costs);
    * no bin is empty when there are at least as many costs as bins;
    * with `equal_counts`, the counts of any two bins differ by one at the most. Where the bins divide the costs evenly,
      they are equal, and max(sums) - min(sums) <= max(costs) - min(costs).

    Raises ValueError when num_bins < 1 or a cost is negative or not finite.
    """
    if num_bins < 1:
        raise ValueError(f"cannot balance over {num_bins} bins; there must be at least 1")
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"cost {index} is {cost}; costs must be finite and not negative")

    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    width = num_bins if equal_counts else 1
    # A partial partition is the sorted list of its bins that hold anything: the heaviest first, and of equal sums the
    # one with most indices. The empty ones would come last and are left out.
    heap: list[tuple[float, int, list[_Bin]]] = []
    for number, start in enumerate(range(0, len(order), width)):
        bins: list[_Bin] = [(-costs[index], -1, index, None) for index in order[start : start + width]]
        heap.append((_negative_spread(bins, num_bins), number, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # Bin i of the one meets bin num_bins - 1 - i of the other, which may be empty.
        met = max(0, len(first) + len(second) - num_bins)
        alone_first, alone_second = len(first) - met, len(second) - met
        pairs = zip(first[alone_first:], reversed(second[alone_second:]), strict=True)
        joined: list[_Bin] = [(a[0] + b[0], a[1] + b[1], min(a[2], b[2]), (a, b)) for a, b in pairs]
        joined += first[:alone_first] + second[:alone_second]
        joined.sort()
        heapq.heappush(heap, (_negative_spread(joined, num_bins), number, joined))
    result = [_indices(entry) for entry in heap[0][2]] if heap else []
    result += [[] for _ in range(num_bins - len(result))]

    assert sorted(index for indices in result for index in indices) == list(range(len(costs))), "not a partition"
    assert len(costs) < num_bins or all(result), "an empty bin though there are enough costs"
    return result


# (-sum, -count, the smallest index in it, the two bins it was joined from). Bins of one partial partition differ in
# their smallest index, so that sorting them never looks at the last entry.
_Bin = tuple[float, int, int, tuple["_Bin", "_Bin"] | None]


def _negative_spread(bins: Sequence[_Bin], num_bins: int) -> float:
    """-(heaviest - lightest), for a heap that gives the widest first."""
    return bins[0][0] - (bins[-1][0] if len(bins) == num_bins else 0)


def _indices(entry: _Bin) -> list[int]:
    """The indices in a bin, ascending."""
    found: list[int] = []
    open_entries = [entry]
    while open_entries:
        _, _, index, parts = open_entries.pop()
        if parts is None:
            found.append(index)
        else:
            open_entries += parts
    return sorted(found)


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    multiple: int = 1,
    count_multiple: int = 1,
    min_count: int = 0,
    key: str = "max_tokens_per_gpu",
) -> Bins:
    """Split samples into micro-batches of at most `max_tokens` padded tokens each, balanced by padded tokens.

    lengths: tokens of each sample, >= 1. max_tokens: for all the ranks that share a sequence (the key's value x context
    size). count_multiple: what the number of micro-batches must be a multiple of (interleaved pipelining). min_count:
    ask for more micro-batches than needed, so that ranks agree. key: the configuration key to name in the error.

    Promised:

    * every sample is in exactly one micro-batch; no micro-batch has more than `max_tokens` padded tokens;
    * the count is max(needed, min_count) rounded up to `count_multiple`, where `needed` is what min_count=0 needs
      before rounding (no more than first-fit-decreasing takes, which is within 11/9 of the best possible, plus one);
    * a micro-batch is empty (`[]`) only when there are fewer samples than micro-batches; the empty ones are last.
      `packing.pack` makes a dummy sequence without weight of an empty one;
    * otherwise the micro-batches come largest first, so that the first one meets the memory peak and ranks that meet in
      an expert-parallel exchange do so with micro-batches of like size.

    Raises ValueError when one sample alone is over `max_tokens`.
    """
    _check_counts(lengths, multiple, count_multiple)
    padded = [padded_length(length, multiple) for length in lengths]
    for index, tokens in enumerate(padded):
        if tokens > max_tokens:
            raise ValueError(
                f"sample {index} has {lengths[index]} tokens, {tokens} when padded to a multiple of {multiple}, but a "
                f"micro-batch may have {max_tokens} ({key} x context size); raise {key} to {tokens} / context size or "
                f"more, or lower the longest prompt or response"
            )

    def fits(bins: Bins) -> bool:
        return all(sum(padded[index] for index in indices) <= max_tokens for indices in bins)

    needed: Bins = []
    if padded:
        needed = balance(padded, -(-sum(padded) // max_tokens))
        if not fits(needed):
            needed = _first_fit_decreasing(padded, max_tokens)
    count = padded_length(max(len(needed), min_count), count_multiple)
    result = balance(padded, count) if count else []
    if not fits(result):
        result = _split_further(needed, padded, count)
    result.sort(key=lambda indices: (-sum(padded[index] for index in indices), indices))
    _assert_micro_batches(result, len(padded), count)
    assert fits(result), "a micro-batch over max_tokens"
    return result


def micro_batches_of_size(
    lengths: Sequence[int], micro_batch_size: int, count_multiple: int = 1, min_count: int = 0
) -> Bins:
    """Split samples into micro-batches of at most `micro_batch_size` sequences each: the static variant.

    Promised: every sample is in exactly one micro-batch; the count is max(ceil(samples / micro_batch_size), min_count)
    rounded up to `count_multiple`; the numbers of sequences of any two micro-batches differ by one at the most (so that
    all are full when micro_batch_size divides the samples and no more micro-batches are asked for); lengths are
    balanced; empty (`[]`) only when there are fewer samples than micro-batches, the empty ones last.

    Raises ValueError when micro_batch_size < 1.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    _check_counts(lengths, 1, count_multiple)
    count = padded_length(max(-(-len(lengths) // micro_batch_size), min_count), count_multiple)
    result = balance(lengths, count, equal_counts=True) if count else []
    result.sort(key=lambda indices: (-sum(lengths[index] for index in indices), indices))
    _assert_micro_batches(result, len(lengths), count)
    assert all(len(indices) <= micro_batch_size for indices in result), "a micro-batch over micro_batch_size"
    return result


def _check_counts(lengths: Sequence[int], multiple: int, count_multiple: int) -> None:
    if multiple < 1 or count_multiple < 1:
        raise ValueError(f"multiple is {multiple} and count_multiple is {count_multiple}; both must be at least 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sample {index} has {length} tokens; a sample has at least its prompt's first token")


def _first_fit_decreasing(padded: Sequence[int], max_tokens: int) -> Bins:
    """Bins of at most max_tokens each: the longest sample first, each into the first bin that has room."""
    bins: Bins = []
    room: list[int] = []
    for index in sorted(range(len(padded)), key=lambda index: (-padded[index], index)):
        for number, free in enumerate(room):
            if padded[index] <= free:
                bins[number].append(index)
                room[number] -= padded[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - padded[index])
    return [sorted(indices) for indices in bins]


def _split_further(bins: Bins, padded: Sequence[int], count: int) -> Bins:
    """Halve the largest bins that can be halved until there are `count`; then add empty ones."""
    bins = list(bins)
    while len(bins) < count:
        number = max(range(len(bins)), key=lambda n: (len(bins[n]) > 1, sum(padded[index] for index in bins[n]), -n))
        if len(bins[number]) < 2:
            break
        indices = bins.pop(number)
        bins += [[indices[i] for i in half] for half in balance([padded[index] for index in indices], 2)]
    return bins + [[] for _ in range(count - len(bins))]


def _assert_micro_batches(result: Bins, num_samples: int, count: int) -> None:
    assert len(result) == count, f"{len(result)} micro-batches instead of {count}"
    assert sorted(index for indices in result for index in indices) == list(range(num_samples)), "not a partition"
    assert num_samples < count or all(result), "an empty micro-batch though there are enough samples"


@dataclass(frozen=True)
class StepSchedule:
    """Where every sample of a step is trained.

    mini_batches[m][dp_rank][k] lists the sample indices of micro-batch k of data-parallel rank dp_rank in mini-batch m.
    For eight samples, two mini-batches and two ranks: [[[[0, 3]], [[1, 2]]], [[[4, 5]], [[6, 7]]]]."""

    mini_batches: list[list[Bins]]

    @property
    def num_micro_batches(self) -> list[int]:
        """Micro-batches of each mini-batch, the same on every rank."""
        return [len(ranks[0]) for ranks in self.mini_batches]

    @property
    def assignment(self) -> Bins:
        """For each data-parallel rank the indices of all its samples over the step, ascending."""
        ranks = zip(*self.mini_batches, strict=True)
        return [sorted(index for bins in rank for indices in bins for index in indices) for rank in ranks]


def schedule_step(
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    *,
    mini_batch_prompts: int,
    num_data_parallel: int,
    hidden_size: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    multiple: int = 1,
    count_multiple: int = 1,
    key: str = "max_tokens_per_gpu",
) -> StepSchedule:
    """Plan a step's updates: mini-batches of whole groups, spread over ranks by cost, cut into micro-batches.

    lengths: tokens of each sample. groups: for each prompt the indices of its samples; together they must name every
    sample once. Mini-batches take the groups in the order given, `mini_batch_prompts` at a time; the last one takes
    what is left. Exactly one of `max_tokens` (dynamic batches, see `micro_batches`) and `micro_batch_size` (static
    ones, see `micro_batches_of_size`) is given.

    Promised:

    * every sample is in exactly one micro-batch; all samples of a group are in one mini-batch;
    * in a mini-batch every rank has the same number of micro-batches, a multiple of `count_multiple`;
    * in a mini-batch, and in the whole step, the ranks' costs (`sequence_cost`) differ by no more than the costliest
      sample's;
    * with `micro_batch_size`, the ranks' numbers of samples in a mini-batch differ by one at the most;
    * a rank is without samples in a mini-batch, or a micro-batch empty (`[]`), only when there are too few samples for
      all.

    Raises ValueError when groups are no partition of the samples, or a sample alone is over `max_tokens`.
    """
    if mini_batch_prompts < 1 or num_data_parallel < 1:
        raise ValueError(
            f"mini_batch_prompts is {mini_batch_prompts} and there are {num_data_parallel} data-parallel ranks; both "
            f"must be at least 1"
        )
    _check_groups(groups, len(lengths))
    totals = [0] * num_data_parallel
    mini_batches: list[list[Bins]] = []
    for start in range(0, len(groups), mini_batch_prompts):
        members = sorted(index for group in groups[start : start + mini_batch_prompts] for index in group)
        costs = [sequence_cost(lengths[index], hidden_size) for index in members]
        bins = balance(costs, num_data_parallel, equal_counts=micro_batch_size is not None)
        # The heaviest bin goes to the rank that has done least so far: so the spread does not add up over mini-batches.
        ranks = sorted(range(num_data_parallel), key=lambda rank: (totals[rank], rank))
        per_rank: Bins = [[] for _ in ranks]
        for rank, indices in zip(ranks, bins, strict=True):
            per_rank[rank] = [members[i] for i in indices]
            totals[rank] += sum(costs[i] for i in indices)
        mini_batches.append(
            _equal_micro_batches(per_rank, lengths, max_tokens, micro_batch_size, multiple, count_multiple, key),
        )
    schedule = StepSchedule(mini_batches)
    everyone = sorted(index for rank in schedule.assignment for index in rank)
    assert everyone == list(range(len(lengths))), "a sample is missing or trained twice"
    return schedule


def schedule_forward(
    assignment: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    multiple: int = 1,
    count_multiple: int = 1,
    key: str = "forward_max_tokens_per_gpu",
) -> list[Bins]:
    """Cut samples that are already assigned to ranks into micro-batches for a forward-only pass: [dp_rank][k] -> sample
    indices.

    assignment: per data-parallel rank the indices of its samples (`StepSchedule.assignment`). lengths: tokens of every
    sample, by index. The number of micro-batches is the same on all ranks and a multiple of `count_multiple`; each
    rank's samples are exactly those assigned to it. See `micro_batches` and `micro_batches_of_size` for the rest.
    Raises ValueError when a sample alone is over `max_tokens`."""
    return _equal_micro_batches(assignment, lengths, max_tokens, micro_batch_size, multiple, count_multiple, key)


def _equal_micro_batches(
    per_rank: Sequence[Sequence[int]],
    lengths: Sequence[int],
    max_tokens: int | None,
    micro_batch_size: int | None,
    multiple: int,
    count_multiple: int,
    key: str,
) -> list[Bins]:
    if (max_tokens is None) == (micro_batch_size is None):
        raise ValueError(
            f"max_tokens is {max_tokens} and micro_batch_size is {micro_batch_size}; give one: max_tokens for dynamic "
            f"batches, micro_batch_size for static ones"
        )

    def cut(samples: Sequence[int], min_count: int) -> Bins:
        own = [lengths[index] for index in samples]
        if max_tokens is not None:
            bins = micro_batches(own, max_tokens, multiple, count_multiple, min_count, key)
        else:
            assert micro_batch_size is not None
            bins = micro_batches_of_size(own, micro_batch_size, count_multiple, min_count)
        return [[samples[i] for i in indices] for indices in bins]

    cuts = [cut(samples, 0) for samples in per_rank]
    count = max((len(bins) for bins in cuts), default=0)
    cuts = [bins if len(bins) == count else cut(samples, count) for samples, bins in zip(per_rank, cuts, strict=True)]
    assert all(len(bins) == count for bins in cuts), "ranks disagree about the number of micro-batches"
    return cuts


def _check_groups(groups: Sequence[Sequence[int]], num_samples: int) -> None:
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        for index in group:
            if not 0 <= index < num_samples:
                raise ValueError(
                    f"group {number} names sample {index}, but there are {num_samples} samples (0 to {num_samples - 1})"
                )
            if index in seen:
                raise ValueError(
                    f"sample {index} is in group {seen[index]} and in group {number}; a sample belongs to one group"
                )
            seen[index] = number
    if len(seen) != num_samples:
        missing = sorted(set(range(num_samples)) - set(seen))
        raise ValueError(f"{len(missing)} of {num_samples} samples are in no group, the first is sample {missing[0]}")
