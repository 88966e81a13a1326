"""The model shapes that benchmarks know by name; weights are random, for speed does not depend on them."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen2Config

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "llama",
        "hidden": 128,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 256,
        "vocab": 512,
        "tied": False,
    },
    "smollm2-135m": {
        "kind": "llama",
        "hidden": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "ffn": 1536,
        "vocab": 49152,
        "tied": True,
    },
    "qwen2.5-0.5b": {
        "kind": "qwen2",
        "hidden": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "ffn": 4864,
        "vocab": 151936,
        "tied": True,
    },
    "qwen2.5-1.5b": {
        "kind": "qwen2",
        "hidden": 1536,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "ffn": 8960,
        "vocab": 151936,
        "tied": True,
    },
    "llama-3.1-8b": {
        "kind": "llama",
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128256,
        "tied": False,
    },
}


def make_config(name: str) -> Any:
    """The Hugging Face configuration of a shape in SHAPES."""
    shape = SHAPES[name]
    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape["kind"]]
    return cls(
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["ffn"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=32768,
    )
