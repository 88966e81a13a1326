"""Where the weights of a run's roles and of its engine lie: the one way from a configuration to their layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config import Config, ParallelConfig
from megarl.model.families import declare, declare_role
from megarl.parallel.topology import RankGrid, padded_vocab_size
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import SGLANG_VOCAB_MULTIPLE, hf_layout, megatron_layout, sglang_layout


def role_layout(role: str, hf_config: Any, parallel: ParallelConfig, num_ranks: int, fused_norms: bool) -> Layout:
    """The Megatron layout of a role. fused_norms: Transformer Engine's names of the norms; rectangles do not depend on
    it.

    Raises:
        ValueError: a family that is not known, or sizes that do not divide the ranks or the model.
    """
    vocab = padded_vocab_size(hf_config.vocab_size, parallel.tensor)
    return megatron_layout(declare_role(role, hf_config), RankGrid(num_ranks, parallel), vocab, fused_norms)


def role_layouts(config: Config, hf_configs: Mapping[str, Any]) -> dict[str, Layout]:
    """The layout of each of the run's roles, by the Hugging Face configuration of each.

    Raises:
        ValueError: as `role_layout`, naming the role.
    """
    layouts = {}
    for role, parallel in config.roles().items():
        with naming(f"{role}.parallel"):
            layouts[role] = role_layout(role, hf_configs[role], parallel, config.cluster.num_ranks, fused_norms=False)
    return layouts


def engine_layout(config: Config, hf_config: Any, num_replicas: int | None = None) -> Layout:
    """The layout of the run's rollout engine. num_replicas: of SGLang; None: as many as the run has.

    Raises:
        ValueError: the sizes do not divide the model's; names the keys.
    """
    own, sglang = config.rollout, config.rollout.sglang
    if own.engine == "hf":
        return hf_layout(declare(hf_config), config.cluster.num_ranks)
    with naming(engine_keys(config)):
        return sglang_layout(
            declare(hf_config),
            own.tensor,
            config.num_replicas if num_replicas is None else num_replicas,
            SGLANG_VOCAB_MULTIPLE,
            sglang.expert,
            sglang.data_parallel,
            sglang.data_parallel_head,
        )


def engine_keys(config: Config) -> str:
    """The keys that an error about the engine's sizes names."""
    keys = "rollout.sglang.data_parallel, " if config.rollout.sglang.data_parallel > 1 else ""
    return f"{keys}rollout.tensor, rollout.sglang.expert"


@contextlib.contextmanager
def naming(keys: str) -> Iterator[None]:
    """A ValueError from within begins with the keys that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{keys}: {error}") from error
