"""Model FLOPs by hand, and against the ratio that was measured between verl's count and ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.engines.flops import attention_flops, matmul_parameters, peak_flops, train_flops, train_flops_verl

# hidden 4, 2 heads of 3, 1 KV head, FFN 8, two layers, 10 words.
SMALL = SimpleNamespace(
    hidden_size=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=3,
    intermediate_size=8,
    num_hidden_layers=2,
    vocab_size=10,
)
QWEN = SimpleNamespace(
    hidden_size=896,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    num_hidden_layers=24,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def test_parameters_in_matrix_products_by_hand() -> None:
    """A layer: Q and output 4 x 6 each, K and V 4 x 3 each = 72; gate, up, down 3 x 4 x 8 = 96. Output layer 4 x 10."""
    assert matmul_parameters(SMALL, 10) == 2 * (72 + 96) + 40
    assert matmul_parameters(SMALL, 1) == 2 * (72 + 96) + 4


def test_of_the_experts_those_count_that_see_the_token() -> None:
    """Layer 1 of 2 has 5 experts, of which a token sees 2: router 4 x 5, and 2 x 3 x 4 x 6 = 144. Layer 0 is dense."""
    routed = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "decoder_sparse_step": 2}
    model = SimpleNamespace(**vars(SMALL), **routed)
    assert matmul_parameters(model, 10) == 2 * 72 + 96 + (20 + 144) + 40


def test_training_by_hand() -> None:
    """Attention forward: 2 x 2 layers x width 6 x (3^2 + 5^2) = 816, which is half of 4 x n^2 x width x layers."""
    assert attention_flops(SMALL, [3, 5]) == 816
    assert train_flops(SMALL, [3, 5], 10) == 6 * 376 * 8 + 3 * 816
    assert train_flops_verl(SMALL, [3, 5]) == 6 * 416 * 8 + 3 * 816


def test_splitting_the_batch_changes_nothing_but_splitting_a_sequence_does() -> None:
    whole = train_flops(SMALL, [3, 5], 10)
    assert train_flops(SMALL, [3], 10) + train_flops(SMALL, [5], 10) == whole
    assert train_flops(SMALL, [8], 10) > whole


def test_a_model_of_half_a_billion() -> None:
    """Qwen2.5-0.5B has 494.0 M parameters with its tied embedding, of which biases and norms are no products."""
    assert matmul_parameters(QWEN, QWEN.vocab_size) == pytest.approx(494.0e6, rel=1e-3)
    # FACTS.md: verl counts 1.27 times ours for this model (sequences of 768 tokens).
    lengths = [768] * 42
    ratio = train_flops_verl(QWEN, lengths) / train_flops(QWEN, lengths, QWEN.vocab_size)
    assert ratio == pytest.approx(1.27, abs=0.005)


def test_peaks_are_known_by_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("cpu") is None
