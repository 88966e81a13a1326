"""Rotary embeddings against transformers' own, and against numbers worked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.model.rope import rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(rope: dict[str, Any], **changes: Any) -> Any:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    return transformers.LlamaConfig(**{**sizes, "rope_parameters": {"rope_theta": 5e5, **rope}, **changes})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        {**LLAMA3, "original_max_position_embeddings": 512},
        {**LLAMA3, "factor": 32.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        },
    ],
)
def test_scaled_embeddings_are_transformers(rope: dict[str, Any]) -> None:
    for changes in ({}, {"head_dim": 80}):
        made = config(rope, **changes)
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](made, torch.device("cpu"))
        found = rotary(made)
        torch.testing.assert_close(found.inverse_frequencies, frequencies, rtol=1e-6, atol=0)
        assert found.attention_factor == pytest.approx(factor, rel=1e-12)


def test_a_plain_embedding_by_hand() -> None:
    found = rotary(SimpleNamespace(rope_theta=100.0, hidden_size=16, num_attention_heads=4, rope_scaling=None))
    assert found.inverse_frequencies.tolist() == pytest.approx([1.0, 0.1])
    assert found.attention_factor == 1.0


def test_llama3_by_hand() -> None:
    """theta 2 ** 8 and 8 channels: inverse frequencies 1, 1/4, 1/16, 1/64; over 64 x pi tokens they turn 32, 8, 2 and
    1/2 times. Above 4 turns they stay, below 1 they are divided by 8, and 2 turns lie a third of the way up."""
    rope = {**LLAMA3, "rope_theta": 256.0, "original_max_position_embeddings": 64 * math.pi}
    found = rotary(SimpleNamespace(rope_parameters=rope, head_dim=8, max_position_embeddings=1))
    mixed = (1 / 3 + 2 / 3 / 8) / 16
    assert found.inverse_frequencies.tolist() == pytest.approx([1.0, 0.25, mixed, 1 / 64 / 8])


def test_the_older_spelling_in_a_file_is_understood(tmp_path: Path) -> None:
    """As Qwen2.5's instructions for long contexts have it."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 1024}
    old = {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": scaling, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(old))
    read = rotary(transformers.AutoConfig.from_pretrained(tmp_path))
    by_hand = rotary(SimpleNamespace(**{name: old[name] for name in ("rope_theta", "rope_scaling", *sizes)}))
    new = rotary(config({"rope_type": "yarn", "rope_theta": 1e6, **scaling}))
    for found in (read, by_hand):
        assert torch.equal(found.inverse_frequencies, new.inverse_frequencies)
        assert found.attention_factor == new.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic' in /m/config.json; megarl supports only"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type is 'longrope'"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 3}, "beta is 3 .* absent with rope_type 'linear'"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor is None"),
        ({"rope_type": "default", "factor": 2.0}, "factor is 2.0 .* absent with rope_type 'default'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "default", "rope_theta": None}, "rope_theta is None"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is"),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    parameters = {"rope_theta": 1e4, **rope}
    made = SimpleNamespace(rope_parameters=parameters, head_dim=8, max_position_embeddings=64, _name_or_path="/m")
    with pytest.raises(ValueError, match=f"rope_parameters.{message}"):
        rotary(made)
