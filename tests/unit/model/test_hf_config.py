from typing import Any

import pytest
import transformers

from megarl.config import ParallelConfig, RecomputeConfig
from megarl.model.hf_config import check_supported, head_dim, rope_theta, transformer_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
}


def config(kind: str = "llama", **changes: Any) -> Any:
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }
    made = classes[kind](**{**SIZES, **changes})
    made._name_or_path = "/models/tiny"
    return made


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu' in /models/tiny/config.json; megarl supports only silu",
        ),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("mistral", {"sliding_window": 64}, "sliding_window is 64"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "layer_types is"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters.rope_type is 'linear'",
        ),
    ],
)
def test_what_changes_the_result_is_refused_by_name(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_supported(config(kind, **changes))


def test_another_architecture_is_refused() -> None:
    other = transformers.GPT2Config()
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        check_supported(other)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_defaults_of_the_families_are_supported(kind: str) -> None:
    check_supported(config(kind))
    check_supported(config("mistral", sliding_window=None))


def test_rope_theta_is_read_from_both_places() -> None:
    class Old:
        rope_theta = 5e5
        rope_scaling = None

    assert rope_theta(Old()) == 5e5
    assert rope_theta(config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})) == 1e6


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    assert head_dim(config("qwen3", head_dim=16)) == 16
    assert head_dim(config("qwen2")) == 8


def test_fields_of_the_transformer_config() -> None:
    made = transformer_config(
        config("qwen2"), ParallelConfig(tensor=2, pipeline=2, sequence=True), "bf16", RecomputeConfig(kind="full")
    )
    assert (made.num_layers, made.ffn_hidden_size, made.num_query_groups, made.kv_channels) == (4, 64, 2, 8)
    assert made.add_qkv_bias
    assert not made.qk_layernorm
    assert made.sequence_parallel
    assert made.bf16
    assert made.recompute_granularity == "full"
    assert made.calculate_per_token_loss
    assert transformer_config(config("qwen3"), ParallelConfig()).qk_layernorm


def test_interleaved_stages_do_not_batch_their_sends() -> None:
    made = transformer_config(config(), ParallelConfig(pipeline=2, virtual_pipeline=2))
    assert made.overlap_p2p_comm
    assert not made.batch_p2p_comm


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads is 2 in /models/tiny/config.json, which tensor 4"):
        transformer_config(config(), ParallelConfig(tensor=4))
    with pytest.raises(ValueError, match="4 layers do not divide by pipeline 3"):
        transformer_config(config(), ParallelConfig(pipeline=3))
