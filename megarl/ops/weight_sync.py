"""The plan of a weight sync for any sizes, without a GPU: what `megarl plan` and tools/plan_sync.py print."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.model.families import declare
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import SGLANG_VOCAB_MULTIPLE, hf_layout, sglang_layout
from megarl.reshard.plan import Place, ReshardPlan, plan


def engine_layout(
    hf_config: Any,
    tensor: int,
    num_replicas: int,
    expert: int = 1,
    data_parallel: int = 1,
    data_parallel_head: bool = False,
) -> Layout:
    """SGLang's, of `num_replicas` replicas.

    Raises:
        ValueError: the sizes do not divide the model's.
    """
    return sglang_layout(
        declare(hf_config), tensor, num_replicas, SGLANG_VOCAB_MULTIPLE, expert, data_parallel, data_parallel_head
    )


def configured_engine(config: Config, hf_config: Any) -> Layout:
    """The layout of the run's engine.

    Raises:
        ValueError: the sizes do not divide the model's; names the keys.
    """
    own, sglang = config.rollout, config.rollout.sglang
    if own.engine == "hf":
        return hf_layout(declare(hf_config), config.cluster.num_ranks)
    try:
        copies = (sglang.data_parallel, sglang.data_parallel_head)
        return engine_layout(hf_config, own.tensor, config.num_replicas, sglang.expert, *copies)
    except ValueError as error:
        keys = "rollout.sglang.data_parallel, " if sglang.data_parallel > 1 else ""
        raise ValueError(f"{keys}rollout.tensor, rollout.sglang.expert: {error}") from error


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
