"""The rotary embedding that a Hugging Face configuration asks for: plain, or scaled by linear, llama3 or yarn.

Pure arithmetic, equal to transformers'. Megatron's own options for scaled embeddings are not used: GPTModel fixes
llama3's factors (0.16.1), and Transformer Engine's fused kernel leaves out yarn's factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.model.families.llama import head_dim
from megarl.model.refusal import refusal

_OPTIONS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""What each type reads beside rope_theta."""

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True)
class Rotary:
    """Query and key channels (i, i + d/2) turn by position x inverse_frequencies[i]."""

    inverse_frequencies: torch.Tensor  # [d / 2], float32
    attention_factor: float
    """Queries and keys are both multiplied by this (yarn): attention's logits by its square."""


def rotary(hf_config: Any) -> Rotary:
    """From rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

    Raises ValueError, with the field, its value and the file, for a type or an option that is not known."""
    options = _options(hf_config)
    theta, dim = float(options["rope_theta"]), head_dim(hf_config)
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if options["rope_type"] == "linear":
        return Rotary(plain / options["factor"], 1.0)
    if options["rope_type"] == "llama3":
        return Rotary(_llama3(plain, options), 1.0)
    if options["rope_type"] == "yarn":
        return Rotary(_yarn(theta, dim, options), _yarn_attention_factor(options))
    return Rotary(plain, 1.0)


def _options(hf_config: Any) -> dict[str, Any]:
    """The options with rope_type, rope_theta and the original length filled in; those that are null are left out."""
    given = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    options = {name: value for name, value in given.items() if value is not None}
    kind = options.pop("rope_type", options.pop("type", "default"))
    options.pop("type", None)
    if kind not in _OPTIONS:
        raise refusal(hf_config, "rope_parameters.rope_type", kind, " or ".join(_OPTIONS))
    theta = options.pop("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise refusal(hf_config, "rope_parameters.rope_theta", None, "a number")
    if options.pop("partial_rotary_factor", 1.0) != 1.0:
        raise refusal(hf_config, "rope_parameters.partial_rotary_factor", given["partial_rotary_factor"], "1.0")
    for name, value in options.items():
        if name not in _OPTIONS[kind]:
            raise refusal(hf_config, f"rope_parameters.{name}", value, f"absent with rope_type {kind!r}")
    for name in _REQUIRED[kind]:
        if name not in options:
            raise refusal(hf_config, f"rope_parameters.{name}", None, f"a number with rope_type {kind!r}")
    if "original_max_position_embeddings" in _OPTIONS[kind]:
        outside = getattr(hf_config, "original_max_position_embeddings", None)
        original = outside or options.get("original_max_position_embeddings") or hf_config.max_position_embeddings
        options["original_max_position_embeddings"] = original
        options.setdefault("factor", hf_config.max_position_embeddings / original)
    return {**options, "rope_type": kind, "rope_theta": theta}


def _llama3(plain: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: wavelengths longer than original / low_freq_factor are stretched by factor, those shorter than
    original / high_freq_factor stay, and between them the two are mixed."""
    factor, low, high = (float(options[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)  # over the original length
    stays = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - stays) * plain / factor + stays * plain


def _yarn(theta: float, dim: int, options: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): channels that turn more than beta_fast times over the original length stay,
    those that turn less than beta_slow times are stretched by factor, with a linear ramp between them."""

    def channel_that_turns(times: float) -> float:
        original = options["original_max_position_embeddings"]
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = channel_that_turns(options.get("beta_fast") or 32)
    last = channel_that_turns(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return stretched / (options["factor"] * powers) + (1 - stretched) / powers


def _yarn_attention_factor(options: Mapping[str, Any]) -> float:
    """The file's own, else 0.1 ln(factor) + 1 (arXiv:2309.00071, equation 22), or the ratio of two such with DeepSeek's
    mscale and mscale_all_dim."""

    def scale(weight: float) -> float:
        return 1.0 if options["factor"] <= 1 else 0.1 * weight * math.log(options["factor"]) + 1.0

    if "attention_factor" in options:
        return float(options["attention_factor"])
    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)
