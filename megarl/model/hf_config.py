"""From a Hugging Face configuration to Megatron's. Every field that changes the result is either understood or refused.

Nothing here imports megatron until `transformer_config` is called.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from megarl.compat.megatron_offload import leaves_weights
from megarl.config import ParallelConfig, RecomputeConfig
from megarl.model.families.llama import head_dim
from megarl.model.families.qwen3_moe import has_experts
from megarl.model.refusal import config_file, refusal
from megarl.model.rope import rotary
from megarl.parallel.device import is_cuda
from megarl.parallel.topology import VOCAB_MULTIPLE, padded_vocab_size, stage_sizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DTYPES",
    "FORWARD_ONLY_ROLES",
    "VOCAB_MULTIPLE",
    "Precision",
    "Role",
    "check_supported",
    "head_dim",
    "padded_vocab_size",
    "stage_fields",
    "transformer_config",
]

Role = Literal["actor", "critic", "reference", "reward_model"]
Precision = Literal["bf16", "fp32"]

FORWARD_ONLY_ROLES: tuple[Role, ...] = ("reference", "reward_model")
"""They have no gradients."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class _Family:
    """What the configuration file does not say but the architecture implies."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True, experts=True),
}


def check_supported(hf_config: Any) -> None:
    """Raises ValueError, with the field, its value and the file, for anything that Megatron would compute otherwise."""
    if hf_config.model_type not in _FAMILIES:
        raise refusal(hf_config, "model_type", hf_config.model_type, " or ".join(_FAMILIES))
    required = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
    for name, value in required.items():
        found = getattr(hf_config, name, None)
        if found is not None and found != value:
            raise refusal(hf_config, name, found, str(value))
    kinds = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        raise refusal(hf_config, "layer_types", sorted(kinds), "full_attention throughout")
    window = getattr(hf_config, "sliding_window", None)
    is_used = getattr(hf_config, "use_sliding_window", True) and window is not None
    if is_used and window < hf_config.max_position_embeddings:
        raise refusal(hf_config, "sliding_window", window, "null")
    rotary(hf_config)
    if _FAMILIES[hf_config.model_type].experts:
        _check_experts(hf_config)


def _check_experts(hf_config: Any) -> None:
    num_experts, top_k = hf_config.num_experts, hf_config.num_experts_per_tok
    if num_experts < 1:
        raise refusal(hf_config, "num_experts", num_experts, "1 or more")
    if not 1 <= top_k <= num_experts:
        raise refusal(hf_config, "num_experts_per_tok", top_k, f"1 to num_experts, which is {num_experts}")
    if top_k == 1 and hf_config.norm_topk_prob:
        raise refusal(hf_config, "norm_topk_prob", True, "false with num_experts_per_tok 1: the router could not learn")


def transformer_config(
    hf_config: Any,
    parallel: ParallelConfig,
    precision: Precision = "bf16",
    recompute: RecomputeConfig | None = None,
    trains: bool = True,
    transformer_engine: bool = False,
    offload_activations: Sequence[str] = (),
) -> TransformerConfig:
    """Megatron's configuration for one role.

    Args:
        hf_config: a transformers configuration, or any object with the same attributes.
        parallel: the role's sizes.
        precision: of parameters and activations.
        recompute: of activations in backward; None: none.
        trains: False for a role that only runs forward (no gradients, no recompute).
        transformer_engine: the layers are Transformer Engine's, so its fused rotary embedding is there too.
        offload_activations: modules whose saved activations wait in host memory; not for a role without gradients.

    Raises ValueError when the model cannot be expressed (see `check_supported`) or the sizes do not divide it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    check_supported(hf_config)
    _check_divisible(hf_config, parallel)
    family = _FAMILIES[hf_config.model_type]
    dtype = DTYPES[precision]
    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        softmax_scale=_softmax_scale(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # With calculate_per_token_loss Megatron multiplies neither by 1 / micro-batches nor by 1 / data parallel: the
        # losses come divided by global counts.
        calculate_per_token_loss=True,
        bf16=precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        # Micro-batches differ in length. 0.16.1 allows that with this dispatcher only, even for dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # With overlapped sends Megatron frees an output while its send may still read it: wrong gradients now and then.
        deallocate_pipeline_outputs=virtual is None,
        # Interleaved stages with batched sends and two pipeline ranks give wrong results without an error (0.16.1).
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        use_cpu_initialization=not is_cuda(),
        bias_activation_fusion=is_cuda(),
        bias_dropout_fusion=False,  # without biases and dropout there is an addition left, and nothing to fuse
        masked_softmax_fusion=is_cuda(),
        persist_layer_norm=is_cuda(),
        apply_rope_fusion=transformer_engine,
        gradient_accumulation_fusion=trains and is_cuda() and _has_gradient_accumulation_kernel(),
        # It casts the gradient of the logits to bf16 whatever their type, and we never use it: see parallel/vocab.py.
        cross_entropy_loss_fusion=False,
        **_expert_fields(hf_config, transformer_engine),
        **stage_fields(parallel),
        **_recompute_fields(recompute if trains else None, hf_config.num_hidden_layers, parallel),
        **_offload_fields(offload_activations, transformer_engine),
    )


def _expert_fields(hf_config: Any, transformer_engine: bool) -> dict[str, Any]:
    if not _FAMILIES[hf_config.model_type].experts:
        return {}
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_layer_freq": [int(has_experts(hf_config, layer)) for layer in range(hf_config.num_hidden_layers)],
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # Weights that add up to one are the softmax over the chosen experts; else it is taken over all of them.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        # Reinforcement learning keeps the balance that pretraining made: no auxiliary loss.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine,
    }


def _softmax_scale(hf_config: Any) -> float | None:
    """None: Megatron's own, 1 / sqrt(head_dim). Yarn multiplies queries and keys by a factor; the softmax's scale is
    where every attention takes it, whereas fused rotary kernels leave it out."""
    factor = rotary(hf_config).attention_factor
    return None if factor == 1.0 else factor**2 / math.sqrt(head_dim(hf_config))


def stage_fields(parallel: ParallelConfig) -> dict[str, int | None]:
    """Of two stages the one follows from the other: given both, 0.16.1 divides by zero where stages are interleaved."""
    first, last = parallel.first_stage_layers or None, parallel.last_stage_layers or None
    return {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": None if first and parallel.pipeline == 2 else last,
    }


def _recompute_fields(recompute: RecomputeConfig | None, num_layers: int, parallel: ParallelConfig) -> dict[str, Any]:
    if recompute is None or recompute.kind == "none":
        return {}
    if recompute.kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    wanted, is_full = recompute.num_layers, recompute.kind == "full"
    sizes = sorted({size // parallel.virtual_pipeline for size in stage_sizes(num_layers, parallel)})
    if wanted > sizes[-1] or (is_full and any(size % wanted for size in sizes)):
        even = f"{num_layers} / ({parallel.pipeline} x {parallel.virtual_pipeline}) = " if len(sizes) == 1 else ""
        raise ValueError(
            f"recompute.num_layers is {wanted} with recompute.kind {recompute.kind}, but a (virtual) pipeline stage "
            f"has {even}{' or '.join(map(str, sizes))} layers; "
            + (f"use a divisor of {math.gcd(*sizes)}" if is_full else f"use at most {sizes[-1]}")
        )
    return {
        "recompute_granularity": "full",
        "recompute_method": "block" if recompute.kind == "block" else "uniform",
        "recompute_num_layers": wanted,
    }


def _offload_fields(modules: Sequence[str], transformer_engine: bool) -> dict[str, Any]:
    if not modules:
        return {}
    check_offload(modules, transformer_engine)
    return {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}


def check_offload(modules: Sequence[str], transformer_engine: bool) -> None:
    """Raises ValueError where activations cannot be offloaded."""
    if not transformer_engine:
        raise ValueError(
            f"offload.activations is {', '.join(modules)}, but it needs a GPU, model.precision bf16 and Transformer "
            f"Engine, and one of them is missing; leave it out"
        )
    if not leaves_weights():
        raise ValueError(
            "offload.activations would move weights too: NVTE_CPU_OFFLOAD_V1 is not 1 in the environment, or "
            "Transformer Engine was imported before megarl; set it to 1"
        )


def _has_gradient_accumulation_kernel() -> bool:
    """Apex's kernel that adds weight gradients into main_grad; Megatron's own linear layers raise without it."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _check_divisible(hf_config: Any, parallel: ParallelConfig) -> None:
    stage_sizes(hf_config.num_hidden_layers, parallel)
    layers = range(hf_config.num_hidden_layers)
    routed = _FAMILIES[hf_config.model_type].experts
    splits = [(name, "tensor", parallel.tensor) for name in ("num_attention_heads", "num_key_value_heads")]
    if not routed or not all(has_experts(hf_config, layer) for layer in layers):
        splits.append(("intermediate_size", "tensor", parallel.tensor))
    if routed:
        splits.append(("num_experts", "expert", parallel.expert))
        splits.append(("moe_intermediate_size", "expert_tensor", parallel.expert_tensor))
        if parallel.tensor > 1 and not parallel.sequence:
            raise ValueError(
                f"tensor is {parallel.tensor} without sequence, but with experts each tensor rank must see tokens of "
                "its own: set sequence to true"
            )
    elif parallel.expert > 1 or parallel.expert_tensor > 1:
        raise ValueError(
            f"expert is {parallel.expert} and expert_tensor {parallel.expert_tensor}, but model_type "
            f"{hf_config.model_type} in {config_file(hf_config)} has no experts: set both to 1"
        )
    for name, axis, axis_size in splits:
        size = getattr(hf_config, name)
        if size % axis_size:
            raise ValueError(f"{name} is {size} in {config_file(hf_config)}, which {axis} {axis_size} does not divide")
