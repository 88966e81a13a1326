"""Where a role's weights lie under Megatron: the one way from a Hugging Face config and its sizes to a layout."""

from __future__ import annotations

from typing import Any

from megarl.config import ParallelConfig
from megarl.model.families import declare_role
from megarl.parallel.topology import RankGrid, padded_vocab_size
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import megatron_layout


def role_layout(role: str, hf_config: Any, parallel: ParallelConfig, num_ranks: int, fused_norms: bool) -> Layout:
    """The Megatron layout of a role. fused_norms: Transformer Engine's names of the norms; rectangles do not depend on
    it.

    Raises:
        ValueError: a family that is not known, or sizes that do not divide the ranks or the model.
    """
    vocab = padded_vocab_size(hf_config.vocab_size, parallel.tensor)
    return megatron_layout(declare_role(role, hf_config), RankGrid(num_ranks, parallel), vocab, fused_norms)
