"""tools/check_model.py: what it admits, what it does not, and what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import run
from reference_weights import tiny_model
from safetensors.torch import load_file, save_file

from megarl.model import gpt
from megarl.model.rope import Rotary

PATH = Path(__file__).parents[2] / "tools" / "check_model.py"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 10000.0}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_model", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_model"] = module
    spec.loader.exec_module(module)
    return module


tool = _load()  # before the ranks are forked


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = tiny_model("qwen3_moe", rope=YARN)
    model.config.pad_token_id = 7  # transformers gives its embedding no gradient
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def admits(arguments: list[str]) -> list[tuple[str, tuple[float, ...]]]:
    rows = tool.check(tool._parser().parse_args(arguments))
    assert all(row.is_good for row in rows), rows
    return [(row.what, row.errors) for row in rows]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, []), (2, ["--tensor", "2", "--sequence", "--expert", "2"]), (2, ["--pipeline", "2"]), (2, ["--expert", "2"])],
    ids=["one", "tp2ep2", "pp2", "dp2ep2"],
)
def test_a_good_model_is_admitted_in_every_layout(num_ranks: int, layout: list[str], folder: str) -> None:
    first, *others = run(admits, num_ranks, [folder, *layout])
    assert all(other == first for other in others)
    names = [what.removeprefix("gradient: ") for what, _ in first]
    assert names[0] == "log-probs (greatest)"
    assert sorted(names[1:]) == ["attention", "embeddings", "experts", "feed-forward", "norms", "router"]
    for what, errors in first:
        assert len(errors) == 2, "packed and padded"
        assert 0 <= max(errors) < 1e-5, what


def test_bf16_is_compared_with_transformers_own_error(folder: str) -> None:
    run(admits, 1, [folder, "--precision", "bf16"])


def a_wrong_embedding_is_seen(folder: str) -> int:
    right = gpt.rotary
    gpt.rotary = lambda config: Rotary(2 * right(config).inverse_frequencies, 1.0)  # type: ignore[assignment]
    return int(tool.main([folder]))


def test_a_model_that_is_computed_otherwise_is_not_admitted(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(a_wrong_embedding_is_seen, 1, folder) == [1]
    printed = capfd.readouterr().out
    assert "DIFFERS" in printed
    assert "not admitted" in printed


def changed(folder: str, **fields: Any) -> None:
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, **fields}, file)


def status(arguments: list[str]) -> int:
    return int(tool.main(arguments))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'"),
        ({"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope_parameters.rope_type is 'dynamic'"),
    ],
)
def test_what_is_refused_is_named(
    fields: dict[str, Any], message: str, folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changed(folder, **fields)
    assert run(status, 1, [folder]) == [2]
    assert f"not admitted: {message}" in capfd.readouterr().out


def test_a_missing_tensor_is_named(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    gone = tensors.pop("model.layers.0.mlp.experts.3.up_proj.weight")
    assert gone.shape == torch.Size([24, 32])
    save_file(tensors, path, metadata={"format": "pt"})
    assert run(status, 1, [folder]) == [2]
    printed = " ".join(capfd.readouterr().out.split())
    assert "tensor model.layers.0.mlp.experts.3.up_proj.weight [24, 32] is missing" in printed


def test_a_folder_without_a_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(status, 1, [str(tmp_path)]) == [2]
    assert "holds no config.json" in " ".join(capfd.readouterr().out.split())


def test_the_command_line(folder: str) -> None:
    words = [sys.executable, "-W", "ignore", str(PATH), folder]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "in fp32 on cpu: admitted" in " ".join(ended.stdout.split())
    assert "exit status: 0 admitted" in tool._parser().format_help()
