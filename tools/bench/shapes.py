"""The model shapes that benchmarks know by name; weights are random, for speed does not depend on them."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2Config

from megarl.data.tiny import write_tiny_tokenizer
from megarl.model.families import declare
from megarl.reshard import hf_files
from megarl.reshard.layouts import hf_files_layout

ALPHABET = "0123456789+="
MAX_FILE_BYTES = 4 * 2**30

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


def write_model(shape: str, folder: str, dtype: torch.dtype) -> None:
    """A Hugging Face folder of random weights, with a tokenizer of a few characters."""
    hf_config = make_config(shape)
    hf_config.architectures = [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[hf_config.model_type]]
    hf_config.dtype = dtype
    write_tiny_tokenizer(folder, ALPHABET)
    hf_config.save_pretrained(folder)
    declaration = declare(hf_config)
    count = hf_files.num_files(declaration.tensors(), dtype.itemsize, MAX_FILE_BYTES)
    layout = hf_files_layout(declaration, count)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in range(count):
        tensors = {}
        for name, size in layout.shard(number).parameters.items():
            values = torch.randn(size, device=device, dtype=torch.float32) * 0.02 + ("norm" in name)
            tensors[name] = values.to(dtype).cpu()
        save_file(tensors, os.path.join(folder, hf_files.file_name(number, count)), metadata={"format": "pt"})
    hf_files.write_index(folder, layout, dtype.itemsize)
