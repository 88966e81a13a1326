"""From a Hugging Face state dict to one Megatron rank, written out by hand: the check that is independent of
reshard/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers

VOCAB_SIZE = 90


def tiny_model(
    kind: str,
    tied: bool = False,
    num_layers: int = 4,
    rope: Mapping[str, Any] | None = None,
    norm_topk_prob: bool = True,
) -> Any:
    """A float32 transformers model with weights large enough that mistakes show."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": dict(rope or {"rope_type": "default", "rope_theta": 10000.0}),
        "attn_implementation": "eager",
    }
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common, head_dim=16),
        "qwen2": lambda: transformers.Qwen2Config(**common),
        "qwen3": lambda: transformers.Qwen3Config(**common, head_dim=16),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **common,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=norm_topk_prob,
            mlp_only_layers=[1],
        ),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=None),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + offset)
    return model.float().eval()


def rank_tensor(
    name: str,
    shape: torch.Size,
    weights: Mapping[str, torch.Tensor],
    hf_config: Any,
    tensor: int,
    tensor_rank: int,
    experts: tuple[tuple[int, int], tuple[int, int]] = ((1, 0), (1, 0)),
) -> torch.Tensor:
    """What the parameter `name` holds on a tensor-parallel rank, of weights (or their gradients) named as transformers
    holds them. `value_head.weight` stands for the critic's head. experts: (size, rank) of expert and expert-tensor
    parallel."""

    def columns(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tensor, 0)[tensor_rank]

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tensor, 1)[tensor_rank]

    def vocabulary(whole: torch.Tensor) -> torch.Tensor:
        padded = whole.new_zeros(shape[0] * tensor, whole.shape[1])
        padded[: len(whole)] = whole
        return columns(padded)

    if name == "embedding.word_embeddings.weight":
        return vocabulary(weights["model.embed_tokens.weight"])
    if name == "output_layer.weight" and shape[0] == 1:
        return weights["value_head.weight"]
    if name == "output_layer.weight":
        tied = hf_config.tie_word_embeddings
        return vocabulary(weights["model.embed_tokens.weight" if tied else "lm_head.weight"])
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert found, name
    layer, rest = f"model.layers.{found[1]}", found[2]
    if rest.startswith("self_attention.linear_qkv."):
        groups = hf_config.num_key_value_heads
        parts = [weights[f"{layer}.self_attn.{part}_proj.{rest.split('.')[-1]}"] for part in "qkv"]
        by_group = [part.view(groups, len(part) // groups, *part.shape[1:]) for part in parts]
        return columns(torch.cat(by_group, 1).flatten(0, 1))
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([columns(weights[f"{layer}.mlp.{part}_proj.weight"]) for part in ("gate", "up")])
    found = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", rest)
    if found:
        (expert_size, expert_rank), (split, part) = experts
        expert = expert_rank * (hf_config.num_experts // expert_size) + int(found[1])
        if found[2] == "2":
            return weights[f"{layer}.mlp.experts.down_proj"][expert].chunk(split, 1)[part]
        gate, up = weights[f"{layer}.mlp.experts.gate_up_proj"][expert].chunk(2)
        return torch.cat([gate.chunk(split)[part], up.chunk(split)[part]])
    whole = {
        "mlp.router.weight": "mlp.gate.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    if rest in whole:
        return weights[f"{layer}.{whole[rest]}"]
    split_by_rows = {
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    return rows(weights[f"{layer}.{split_by_rows[rest]}"])


def load(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into an engine of whatever layout."""
    with torch.no_grad():
        for name, parameter in engine.parameters().items():
            parameter.copy_(expected(engine, name, parameter.shape, weights))
    engine.mark_weights_loaded()


def expected(engine: Any, name: str, shape: torch.Size, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`rank_tensor` for the rank on which the engine runs."""
    sizes, here = engine.parallel, engine.groups.coordinates
    experts = (sizes.expert, here.expert), (sizes.expert_tensor, here.expert_tensor)
    return rank_tensor(name, shape, weights, engine.hf_config, sizes.tensor, here.tensor, experts)
