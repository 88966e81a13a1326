"""Model FLOPs, for MFU: what the maths needs, no recompute counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.model.families.llama import head_dim
from megarl.model.families.qwen3_moe import has_experts

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0}
"""Dense bf16, by the vendor's data sheets."""


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU by its name, None where it is not known."""
    return next((value * 1e12 for name, value in PEAK_TFLOPS.items() if name in device_name), None)


def matmul_parameters(hf_config: Any, num_outputs: int) -> int:
    """Parameters that take part in a token's matrix products, each counted once: the embedding look-up is none, the
    output layer (num_outputs: the vocabulary, or 1 for a critic) is one, tied or not. Of a layer's experts those count
    to which the token is sent."""
    hidden, heads, dim = hf_config.hidden_size, hf_config.num_attention_heads, head_dim(hf_config)
    attention = hidden * dim * (2 * heads + 2 * hf_config.num_key_value_heads)
    dense = 3 * hidden * hf_config.intermediate_size
    routed = 0
    if getattr(hf_config, "num_experts", 0):
        routed = hidden * (3 * hf_config.moe_intermediate_size * hf_config.num_experts_per_tok + hf_config.num_experts)
    feed_forward = sum(
        routed if routed and has_experts(hf_config, layer) else dense for layer in range(hf_config.num_hidden_layers)
    )
    return hf_config.num_hidden_layers * attention + feed_forward + num_outputs * hidden


def attention_flops(hf_config: Any, lengths: Sequence[int]) -> float:
    """Forward FLOPs of causal attention: 2 x length^2 x head width a layer (half of the two products' 4)."""
    width = hf_config.num_attention_heads * head_dim(hf_config)
    return 2.0 * hf_config.num_hidden_layers * width * sum(float(n) * n for n in lengths)


def train_flops(hf_config: Any, lengths: Sequence[int], num_outputs: int) -> float:
    """FLOPs of forward and backward over sequences of these lengths: 6 x parameters x tokens + 3 x forward
    attention."""
    dense = 6.0 * matmul_parameters(hf_config, num_outputs) * sum(lengths)
    return dense + 3.0 * attention_flops(hf_config, lengths)


def train_flops_verl(hf_config: Any, lengths: Sequence[int]) -> float:
    """The same by verl's formula, which counts the embedding as a matrix product of its own, tied or not."""
    return train_flops(hf_config, lengths, 2 * hf_config.vocab_size)
