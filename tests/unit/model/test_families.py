from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.model.families import FAMILIES, VALUE_HEAD, declare, declare_critic
from megarl.model.families.llama import head_dim


def config(**changes: Any) -> SimpleNamespace:
    sizes = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    return SimpleNamespace(**{**sizes, **changes})


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 6}
LLAMA_LAYER = {
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
QWEN3_NORMS = {"self_attn.q_norm.weight": (2,), "self_attn.k_norm.weight": (2,)}
QWEN3_MOE_LAYER = {
    **{name: shape for name, shape in LLAMA_LAYER.items() if not name.startswith("mlp.")},
    **QWEN3_NORMS,
    "mlp.gate.weight": (2, 8),
    **{f"mlp.experts.{expert}.{name}_proj.weight": (6, 8) for expert in range(2) for name in ("gate", "up")},
    **{f"mlp.experts.{expert}.down_proj.weight": (8, 6) for expert in range(2)},
}
QWEN2_BIASES = {"self_attn.q_proj.bias": (8,), "self_attn.k_proj.bias": (4,), "self_attn.v_proj.bias": (4,)}


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("llama", LLAMA_LAYER),
        ("mistral", LLAMA_LAYER),
        ("qwen2", {**LLAMA_LAYER, **QWEN2_BIASES}),
        ("qwen3", {**LLAMA_LAYER, **QWEN3_NORMS}),
        ("qwen3_moe", QWEN3_MOE_LAYER),
    ],
)
def test_tensors_by_hand(model_type: str, layer: dict[str, tuple[int, ...]]) -> None:
    expected = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    expected |= {f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    assert declare(config(model_type=model_type, **EXPERTS)).tensors() == expected


def test_layers_between_those_with_experts_are_dense() -> None:
    """Every second layer has experts, but not layer 3."""
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], **EXPERTS}
    declaration = declare(config(model_type="qwen3_moe", **changes))
    tensors = declaration.tensors()
    routed = [f"model.layers.{index}.mlp.gate.weight" in tensors for index in range(6)]
    assert routed == [False, True, False, False, False, True]
    assert [f"model.layers.{index}.mlp.gate_proj.weight" in tensors for index in range(6)] == [not r for r in routed]
    assert (declaration.ffn_size, declaration.num_experts, declaration.expert_ffn_size) == (12, 2, 6)
    assert declare(config(model_type="qwen3_moe", **EXPERTS)).ffn_size == 0, "no layer has that width"


def test_every_family_of_the_table_declares() -> None:
    for model_type in FAMILIES:
        assert declare(config(model_type=model_type, **EXPERTS)).num_layers == 2


def test_a_tied_model_has_no_head() -> None:
    tensors = declare(config(tie_word_embeddings=True)).tensors()
    assert "lm_head.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_has_a_value_head_in_place_of_the_output_layer(tied: bool) -> None:
    tensors = declare_critic(config(tie_word_embeddings=tied)).tensors()
    assert tensors[VALUE_HEAD] == (1, 8)
    assert "lm_head.weight" not in tensors
    body = declare(config(tie_word_embeddings=True)).tensors()
    assert {name: shape for name, shape in tensors.items() if name != VALUE_HEAD} == body


def test_head_dim_is_the_configs_own_or_follows_from_the_hidden_size() -> None:
    assert head_dim(config()) == 2
    assert head_dim(config(head_dim=None)) == 2
    assert head_dim(config(head_dim=6)) == 6
    assert declare(config(head_dim=6)).tensors()["model.layers.0.self_attn.o_proj.weight"] == (8, 24)


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    message = "model_type 'gpt2' is not supported; megarl knows llama, mistral, qwen2, qwen3, qwen3_moe"
    with pytest.raises(ValueError, match=message):
        declare(config(model_type="gpt2"))
