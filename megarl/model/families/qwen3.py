"""Qwen3: Llama with a norm over the channels of each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.model.families.llama import head_dim, llama
from megarl.reshard.declaration import Declaration, Names, Whole


def qwen3(hf_config: Any) -> Declaration:
    """The declaration for a Qwen3Config."""
    base = llama(hf_config)
    norms = head_norms(hf_config)
    return replace(base, layers=tuple((*layer, *norms) for layer in base.layers), copies_attention=True)


def head_norms(hf_config: Any) -> tuple[Whole, Whole]:
    """The norms of query and key heads: one weight a channel, the same for all heads."""
    query, key = (
        Whole(
            f"self_attn.{name}_norm.weight",
            Names(f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight"),
            (head_dim(hf_config),),
        )
        for name in "qk"
    )
    return query, key
