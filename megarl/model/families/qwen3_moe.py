"""Qwen3-MoE: Qwen3 with routed experts in place of the feed-forward, in all layers or in some.

The names are those on disk, one tensor an expert; transformers 5 fuses them in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.model.families.qwen3 import qwen3
from megarl.reshard.declaration import Declaration, Experts, Names, Op, Whole


def qwen3_moe(hf_config: Any) -> Declaration:
    """The declaration for a Qwen3MoeConfig."""
    dense = qwen3(hf_config)
    hidden = hf_config.hidden_size
    attention = tuple(op for op in dense.layers[0] if not any(name.startswith("mlp.") for name in op.tensors()))
    norm = "post_attention_layernorm.weight"
    routed: tuple[Op, ...] = (
        *(op for op in attention if norm not in op.tensors()),
        # Under Transformer Engine too it is a module of its own: the router and all experts read it.
        Whole(norm, Names("pre_mlp_layernorm.weight", norm), (hidden,)),
        Whole("mlp.gate.weight", Names("mlp.router.weight", "mlp.gate.weight"), (hf_config.num_experts, hidden)),
        Experts(
            "mlp.experts.{}.gate_proj.weight",
            "mlp.experts.{}.up_proj.weight",
            "mlp.experts.{}.down_proj.weight",
            megatron=(
                "mlp.experts.local_experts.{}.linear_fc1.weight",
                "mlp.experts.local_experts.{}.linear_fc2.weight",
            ),
            megatron_grouped=("mlp.experts.linear_fc1.weight{}", "mlp.experts.linear_fc2.weight{}"),
            sglang=("mlp.experts.w13_weight", "mlp.experts.w2_weight"),
            num_experts=hf_config.num_experts,
            ffn_size=hf_config.moe_intermediate_size,
            hidden_size=hidden,
        ),
    )
    layers = tuple(routed if has_experts(hf_config, index) else layer for index, layer in enumerate(dense.layers))
    return replace(
        dense,
        layers=layers,
        ffn_size=0 if all(layer is routed for layer in layers) else dense.ffn_size,
        num_experts=hf_config.num_experts,
        expert_ffn_size=hf_config.moe_intermediate_size,
    )


def has_experts(hf_config: Any, layer: int) -> bool:
    """Whether a layer has experts: every decoder_sparse_step-th, but those of mlp_only_layers."""
    if layer in (getattr(hf_config, "mlp_only_layers", None) or []):
        return False
    return (layer + 1) % getattr(hf_config, "decoder_sparse_step", 1) == 0
