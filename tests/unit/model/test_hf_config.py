from typing import Any

import pytest
import transformers

from megarl.config import ParallelConfig, RecomputeConfig
from megarl.model.hf_config import check_supported, head_dim, transformer_config

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
        "qwen3_moe": transformers.Qwen3MoeConfig,
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
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters.rope_type is 'dynamic'",
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


def test_yarn_scales_the_softmax_by_the_square_of_its_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.5}
    made = transformer_config(config("qwen2", rope_parameters=yarn), ParallelConfig())
    assert made.softmax_scale == pytest.approx(1.5**2 / 8**0.5)
    assert transformer_config(config("qwen2"), ParallelConfig()).softmax_scale is None


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


def test_fields_of_experts() -> None:
    """Layer 1 is dense, layers 0, 2 and 3 are not."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    made = transformer_config(
        config("qwen3_moe", norm_topk_prob=True, **sizes), ParallelConfig(tensor=2, sequence=True, expert=2)
    )
    assert (made.num_moe_experts, made.moe_router_topk, made.moe_ffn_hidden_size) == (4, 2, 24)
    assert made.moe_layer_freq == [1, 0, 1, 1]
    assert (made.expert_model_parallel_size, made.expert_tensor_parallel_size) == (2, 1)
    assert made.moe_router_load_balancing_type == "none"
    assert made.moe_router_dtype == "fp32"
    assert not made.moe_router_pre_softmax
    assert not made.moe_grouped_gemm
    plain = config("qwen3_moe", norm_topk_prob=False, **sizes)
    assert transformer_config(plain, ParallelConfig()).moe_router_pre_softmax


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({}, {"tensor": 2}, "with experts each tensor rank must see tokens of its own: set sequence to true"),
        ({}, {"expert": 3}, "num_experts is 4 in /models/tiny/config.json, which expert 3 does not divide"),
        ({"moe_intermediate_size": 25}, {"expert_tensor": 2}, "moe_intermediate_size is 25 .* expert_tensor 2"),
        ({"mlp_only_layers": [0], "intermediate_size": 63}, {"tensor": 2, "sequence": True}, "intermediate_size is 63"),
        ({"num_experts": 0}, {}, "num_experts is 0"),
        ({"num_experts_per_tok": 5}, {}, "num_experts_per_tok is 5 .* 1 to num_experts, which is 4"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, {}, "norm_topk_prob is True"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes: dict[str, Any], parallel: dict[str, Any], message: str) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with pytest.raises(ValueError, match=message):
        transformer_config(config("qwen3_moe", **{**sizes, **changes}), ParallelConfig(**parallel))


def test_a_dense_width_that_no_layer_has_need_not_divide() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 63}
    transformer_config(config("qwen3_moe", **sizes), ParallelConfig(tensor=2, sequence=True))


def test_expert_sizes_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="expert is 2 and expert_tensor 1, but model_type llama .* has no experts"):
        transformer_config(config(), ParallelConfig(expert=2))


def test_interleaved_stages_do_not_batch_their_sends_nor_free_what_is_being_sent() -> None:
    made = transformer_config(config(), ParallelConfig(pipeline=2, virtual_pipeline=2))
    assert made.overlap_p2p_comm
    assert not made.batch_p2p_comm
    assert not made.deallocate_pipeline_outputs


def test_uneven_stages() -> None:
    made = transformer_config(config(), ParallelConfig(pipeline=3, first_stage_layers=1, last_stage_layers=1))
    assert (made.num_layers_in_first_pipeline_stage, made.num_layers_in_last_pipeline_stage) == (1, 1)
    even = transformer_config(config(), ParallelConfig(pipeline=2))
    assert (even.num_layers_in_first_pipeline_stage, even.num_layers_in_last_pipeline_stage) == (None, None)


def test_of_two_stages_megatron_is_told_one() -> None:
    made = transformer_config(config(), ParallelConfig(pipeline=2, first_stage_layers=1, last_stage_layers=3))
    assert (made.num_layers_in_first_pipeline_stage, made.num_layers_in_last_pipeline_stage) == (1, None)


@pytest.mark.parametrize(
    ("kind", "num_layers", "message"),
    [
        ("full", 3, "num_layers is 3 .* a .virtual. pipeline stage has 1 or 3 layers; use a divisor of 1"),
        ("block", 4, "has 1 or 3 layers; use at most 3"),
    ],
)
def test_recompute_counts_the_layers_of_every_stage(kind: Any, num_layers: int, message: str) -> None:
    """A stage with fewer than `block` names recomputes all that it has."""
    uneven = ParallelConfig(pipeline=2, first_stage_layers=1)
    with pytest.raises(ValueError, match=message):
        transformer_config(config(), uneven, recompute=RecomputeConfig(kind=kind, num_layers=num_layers))
    assert transformer_config(config(), uneven, recompute=RecomputeConfig(kind="block", num_layers=3))
    even = ParallelConfig(pipeline=2, first_stage_layers=2)
    assert transformer_config(config(), even, recompute=RecomputeConfig(kind="full", num_layers=2))


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads is 2 in /models/tiny/config.json, which tensor 4"):
        transformer_config(config(), ParallelConfig(tensor=4))
    with pytest.raises(ValueError, match="4 layers do not divide by pipeline 3"):
        transformer_config(config(), ParallelConfig(pipeline=3))
    with pytest.raises(ValueError, match="first_stage_layers 2 and last_stage_layers 1 leave 1 of 4 layers for 0 even"):
        transformer_config(config(), ParallelConfig(pipeline=2, first_stage_layers=2, last_stage_layers=1))
