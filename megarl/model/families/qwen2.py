"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.model.families.llama import llama, qkv
from megarl.reshard.declaration import Declaration


def qwen2(hf_config: Any) -> Declaration:
    """The declaration for a Qwen2Config."""
    base = llama(hf_config)
    bias = qkv(hf_config, "bias")
    return replace(base, layers=tuple((*layer, bias) for layer in base.layers))
