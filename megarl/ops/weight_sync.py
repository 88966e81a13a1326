"""The plan of a weight sync for any sizes, without a GPU: what `megarl plan` and tools/plan_sync.py print."""

from __future__ import annotations

from megarl.reshard.layout import Layout
from megarl.reshard.plan import Place, ReshardPlan, plan


def plan_sync(
    source: Layout, target: Layout, itemsize: int, gpus_per_node: int, bucket_bytes: int, is_split: bool
) -> ReshardPlan:
    """Engine rank r shares the GPU of trainer rank r; with `is_split` the engine has GPUs of its own, on other nodes.

    Args:
        itemsize: bytes of one element on the wire.

    Raises:
        ValueError: the layouts are not of the same tensors.
    """
    first_node = -(-source.num_ranks // gpus_per_node) if is_split else 0
    return plan(
        source,
        target,
        itemsize,
        _places(source.num_ranks, gpus_per_node, 0),
        _places(target.num_ranks, gpus_per_node, first_node),
        bucket_bytes,
    )


def _places(count: int, gpus_per_node: int, first_node: int) -> list[Place]:
    return [Place(first_node + rank // gpus_per_node, rank % gpus_per_node) for rank in range(count)]
