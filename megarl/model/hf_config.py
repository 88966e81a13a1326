"""From a Hugging Face configuration to Megatron's. Every field that changes the result is either understood or refused.

Nothing here imports megatron until `transformer_config` is called.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from megarl.config import ParallelConfig, RecomputeConfig
from megarl.parallel.device import is_cuda
from megarl.parallel.topology import VOCAB_MULTIPLE, padded_vocab_size, stage_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DTYPES",
    "VOCAB_MULTIPLE",
    "Precision",
    "Role",
    "check_supported",
    "head_dim",
    "padded_vocab_size",
    "rope_theta",
    "transformer_config",
]

Role = Literal["actor", "critic", "reference"]
Precision = Literal["bf16", "fp32"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class _Family:
    """What the configuration file does not say but the architecture implies."""

    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
}


def rope_theta(hf_config: Any) -> float:
    """The base of the rotary embedding, from rope_parameters (transformers 5) or rope_theta (before).

    Raises ValueError for scaled, partial or otherwise changed rotary embeddings."""
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise _refusal(hf_config, "rope_parameters.rope_type", kind, "default")
    for name, value in parameters.items():
        if name not in ("rope_type", "type", "rope_theta") and not (name == "partial_rotary_factor" and value == 1.0):
            raise _refusal(hf_config, f"rope_parameters.{name}", value, "absent")
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise _refusal(hf_config, "rope_parameters.rope_theta", None, "a number")
    return float(theta)


def head_dim(hf_config: Any) -> int:
    """Channels a head; hidden_size / num_attention_heads unless the file says otherwise."""
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)


def check_supported(hf_config: Any) -> None:
    """Raises ValueError, with the field, its value and the file, for anything that Megatron would compute otherwise."""
    if hf_config.model_type not in _FAMILIES:
        raise _refusal(hf_config, "model_type", hf_config.model_type, " or ".join(_FAMILIES))
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
            raise _refusal(hf_config, name, found, str(value))
    kinds = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        raise _refusal(hf_config, "layer_types", sorted(kinds), "full_attention throughout")
    window = getattr(hf_config, "sliding_window", None)
    is_used = getattr(hf_config, "use_sliding_window", True) and window is not None
    if is_used and window < hf_config.max_position_embeddings:
        raise _refusal(hf_config, "sliding_window", window, "null")
    rope_theta(hf_config)


def transformer_config(
    hf_config: Any,
    parallel: ParallelConfig,
    precision: Precision = "bf16",
    recompute: RecomputeConfig | None = None,
    trains: bool = True,
    transformer_engine: bool = False,
) -> TransformerConfig:
    """Megatron's configuration for one role.

    Args:
        hf_config: a transformers configuration, or any object with the same attributes.
        parallel: the role's sizes.
        precision: of parameters and activations.
        recompute: of activations in backward; None: none.
        trains: False for a role that only runs forward (no gradients, no recompute).
        transformer_engine: the layers are Transformer Engine's, so its fused rotary embedding is there too.

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
        deallocate_pipeline_outputs=True,
        # Interleaved stages with batched sends and two pipeline ranks give wrong results without an error (0.16.1).
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        use_cpu_initialization=not is_cuda(),
        bias_activation_fusion=is_cuda(),
        bias_dropout_fusion=is_cuda(),
        masked_softmax_fusion=is_cuda(),
        persist_layer_norm=is_cuda(),
        apply_rope_fusion=transformer_engine,
        gradient_accumulation_fusion=trains and is_cuda() and _has_gradient_accumulation_kernel(),
        # It casts the gradient of the logits to bf16 whatever their type, and we never use it: see parallel/vocab.py.
        cross_entropy_loss_fusion=False,
        **_recompute_fields(recompute if trains else None),
    )


def _recompute_fields(recompute: RecomputeConfig | None) -> dict[str, Any]:
    if recompute is None or recompute.kind == "none":
        return {}
    if recompute.kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": recompute.num_layers,
    }


def _has_gradient_accumulation_kernel() -> bool:
    """Apex's kernel that adds weight gradients into main_grad; Megatron's own linear layers raise without it."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _check_divisible(hf_config: Any, parallel: ParallelConfig) -> None:
    stage_layers(hf_config.num_hidden_layers, parallel.pipeline, parallel.virtual_pipeline, 0, 0)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(hf_config, name)
        if size % parallel.tensor:
            raise ValueError(f"{name} is {size} in {_file(hf_config)}, which tensor {parallel.tensor} does not divide")


def _refusal(hf_config: Any, field: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{field} is {value!r} in {_file(hf_config)}; megarl supports only {expected}")


def _file(hf_config: Any) -> str:
    return os.path.join(getattr(hf_config, "_name_or_path", "") or "", "config.json")
