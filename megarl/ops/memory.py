"""What lies in a GPU's memory, by arithmetic alone: each role's parameters, gradients and optimizer states on each
trainer rank, the engine's weights, and the KV cache that its share of the GPU leaves. Bytes throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from megarl.config import Config, OffloadConfig, OptimizerConfig, ParallelConfig
from megarl.model.families.llama import head_dim
from megarl.parallel.topology import RankGrid
from megarl.reshard.layout import Layout, Shard

PARAMETER_BYTES = {"bf16": 2, "fp32": 4}
GRADIENT_BYTES = 4
"""Gradients are summed in float32 whatever the parameters are (engines/optimizer.py, wrap_for_gradients)."""

KV_BYTES = {"bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}


# ------------------------------------------------------------------------------------------------ the trainer's roles


@dataclass(frozen=True)
class RoleMemory:
    """What one role holds on one rank, by the kinds that engines/residency.py moves."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    optimizer_at_start: int = 0
    """Of `optimizer`, what is there before the first step: Adam makes its moments in it."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def idle(self, offload: OffloadConfig) -> RoleMemory:
        """What stays on the GPU while the role has nothing to do."""
        return RoleMemory(
            0 if offload.parameters else self.parameters,
            0 if offload.gradients else self.gradients,
            0 if offload.optimizer else self.optimizer,
            0 if offload.optimizer else self.optimizer_at_start,
        )


def role_memory(
    layout: Layout, parallel: ParallelConfig, precision: str, optimizer: OptimizerConfig | None
) -> tuple[RoleMemory, ...]:
    """What a role holds on each rank of its layout. optimizer: None for a role that does not train.

    Adam's states are split over the ranks that hold the same parameters: of dense layers those of data and context
    parallel, of experts those of the experts' own data parallel. What Megatron's buffers pad (to 64 elements a
    parameter) is not counted."""
    grid = RankGrid(layout.num_ranks, parallel)
    of_shard = [_shard_memory(shard, grid, precision, optimizer) for shard in layout.shards]
    return tuple(of_shard[shard] for shard in layout.shard_of)


def _shard_memory(shard: Shard, grid: RankGrid, precision: str, optimizer: OptimizerConfig | None) -> RoleMemory:
    experts = sum(prod(shape) for name, shape in shard.parameters.items() if ".experts." in name)
    dense = sum(prod(shape) for shape in shard.parameters.values()) - experts
    parameters = (dense + experts) * PARAMETER_BYTES[precision]
    if optimizer is None:
        return RoleMemory(parameters)
    if optimizer.kind == "adam":
        copies = grid.data_parallel_size * grid.parallel.context
        own = -(-dense // copies) - (-experts // grid.expert_data_parallel_size)
    else:
        own = dense + experts  # replicated
    each, at_start = optimizer_bytes(optimizer, precision)
    return RoleMemory(parameters, (dense + experts) * GRADIENT_BYTES, own * each, own * at_start)


def optimizer_bytes(optimizer: OptimizerConfig, precision: str) -> tuple[int, int]:
    """Bytes of states for each element, and those of them that are there before the first step. In float32 the
    parameters themselves are the main parameters."""
    main = 4 if precision == "bf16" else 0
    if optimizer.kind == "sgd":  # without momentum
        return main, main
    if optimizer.state_precision == "bf16":  # Transformer Engine's Adam makes the main parameters too in its first step
        return main + 2 * 2, 0
    return main + 2 * 4, main


# ------------------------------------------------------------------------------------------------ the engine


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an SGLang replica."""

    weights: int
    """Of the tensor-parallel rank that holds most."""
    kv_token: int
    """Of one token in the KV cache: keys and values of all layers, of the heads that the rank holds."""

    def kv_cache(self, share: int) -> int:
        """What the weights leave for the KV cache of SGLang's share of a GPU; negative where they take more."""
        return share - self.weights


def engine_memory(config: Config, hf_config: Any, layout: Layout) -> EngineMemory:
    """Of an SGLang layout."""
    own, precision = config.rollout, config.model.precision
    elements = max(sum(map(prod, shard.parameters.values())) for shard in layout.shards)
    kv_heads = max(hf_config.num_key_value_heads // own.tensor, 1)  # with more ranks than heads a head is repeated
    kv_bytes = KV_BYTES.get(own.sglang.kv_cache_dtype, PARAMETER_BYTES[precision])
    return EngineMemory(
        elements * PARAMETER_BYTES[precision],
        2 * hf_config.num_hidden_layers * kv_heads * head_dim(hf_config) * kv_bytes,
    )


# ------------------------------------------------------------------------------------------------ one GPU


@dataclass(frozen=True)
class Usage:
    """What the roles keep on the fullest GPU in each phase of a step, without the engine."""

    start: int
    """While the engine starts, before the first step: what is free then, SGLang takes its share of. A run that is
    resumed has all of the optimizer's states by then, and its SGLang finds less."""
    training: Mapping[str, int]
    """While a role trains, or (the reference) computes log-probs."""
    sync: int
    """While the actor's weights go to the engine."""
    generation: int


def usage(roles: Mapping[str, Sequence[RoleMemory]], offload: Mapping[str, OffloadConfig]) -> Usage:
    """By role what it holds on each rank, and what of it leaves the GPU while the role is idle."""
    num_ranks = len(roles["actor"])
    idle = {role: [memory.idle(offload[role]) for memory in ranks] for role, ranks in roles.items()}

    def fullest(present: Mapping[str, Sequence[RoleMemory]]) -> int:
        found = {**idle, **present}
        return max(sum(ranks[rank].total for ranks in found.values()) for rank in range(num_ranks))

    at_start = {
        role: [replace(memory, optimizer=memory.optimizer_at_start) for memory in ranks] for role, ranks in idle.items()
    }
    sent = [replace(own, parameters=whole.parameters) for own, whole in zip(idle["actor"], roles["actor"], strict=True)]
    return Usage(
        fullest(at_start),
        {role: fullest({role: ranks}) for role, ranks in roles.items()},
        fullest({"actor": sent}),
        fullest({}),
    )
