"""bf16 under Transformer Engine and NCCL: log-probs and every gradient against transformers in float32, in every
layout, within the multiple of transformers' own bf16 error that tools/check_model.py states (BF16_FACTOR). Run this
file by itself: tests/distributed hides the GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

TOOL = Path(__file__).parents[2] / "tools" / "check_model.py"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def make_folder(kind: str, path: Path) -> Path:
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True}
        config: Any = transformers.Qwen3MoeConfig(**SHAPE, head_dim=64, tie_word_embeddings=False, **experts)
    else:
        config = transformers.Qwen2Config(**SHAPE, tie_word_embeddings=kind == "qwen2 tied")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def check(num_ranks: int, folder: Path, layout: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    words += [str(TOOL), str(folder), "--precision", "bf16", "--sequences", "8", "--length", "700", *layout]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2", "qwen2 tied", "qwen3_moe"])
def test_one_gpu(kind: str, tmp_path: Path) -> None:
    check(1, make_folder(kind, tmp_path), [])


LAYOUTS = {
    "tp2": ["--tensor", "2"],
    "tp2sp": ["--tensor", "2", "--sequence"],
    "pp2": ["--pipeline", "2"],
    "cp2": ["--context", "2"],
    "dp2": [],
}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen2", "qwen2 tied"])
def test_two_gpus(kind: str, layout: str, tmp_path: Path) -> None:
    check(2, make_folder(kind, tmp_path), LAYOUTS[layout])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", [["--expert", "2"], ["--tensor", "2", "--sequence", "--expert", "2"]])
def test_experts_on_two_gpus(layout: list[str], tmp_path: Path) -> None:
    check(2, make_folder("qwen3_moe", tmp_path), layout)
