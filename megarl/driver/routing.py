"""Which replica answers which prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.types import IntArray

Shares = list[list[int]]
"""By replica, the numbers of its prompts, in the order in which they are asked."""


def least_loaded(costs: Sequence[float], loads: Sequence[float]) -> Shares:
    """Each prompt, in order, to the replica that has least to do by then; the first of equals.

    Args:
        costs: by prompt; tokens to generate and to read.
        loads: by replica, what it has to do already.

    >>> least_loaded([5, 1, 1, 1], loads=[0, 0])
    [[0], [1, 2, 3]]
    """
    left = list(loads)
    shares: Shares = [[] for _ in loads]
    for number, cost in enumerate(costs):
        replica = min(range(len(left)), key=lambda r: (left[r], r))
        shares[replica].append(number)
        left[replica] += cost
    return shares


def by_prefix(prompts: Sequence[IntArray], costs: Sequence[float], num_replicas: int) -> Shares:
    """Prompts that begin alike to the same replica, whose cache then holds the beginning once: they are put in the
    order of their tokens and cut into neighbours of about equal cost.

    >>> by_prefix([np.array([7, 1]), np.array([3]), np.array([7, 2])], [1, 2, 1], 2)
    [[1], [0, 2]]
    """
    order = sorted(range(len(prompts)), key=lambda number: tuple(map(int, prompts[number])))
    shares: Shares = [[] for _ in range(num_replicas)]
    total, before = sum(costs), 0.0
    for number in order:
        middle = before + costs[number] / 2
        shares[min(int(middle * num_replicas / total), num_replicas - 1) if total else 0].append(number)
        before += costs[number]
    return shares
