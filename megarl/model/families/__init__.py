"""Model families: each declares its weights' names and how they are split, once. A family is a function from a Hugging
Face config to a `Declaration`; the table below is all there is to registering one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.model.families.llama import llama
from megarl.model.families.qwen2 import qwen2
from megarl.model.families.qwen3 import qwen3
from megarl.model.families.qwen3_moe import qwen3_moe
from megarl.reshard.declaration import Declaration, Names, Whole

FAMILIES: dict[str, Callable[[Any], Declaration]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
"""By the config's `model_type`."""

VALUE_HEAD = "score.weight"
"""The canonical name of a value head: that of transformers' sequence-classification models."""

VALUE_ROLES = ("critic", "reward_model")
"""The roles that have one, in place of an output layer."""


def declare(hf_config: Any) -> Declaration:
    """The weights of a causal language model.

    Raises:
        ValueError: the family is not known, naming those that are.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(
            f"model_type {hf_config.model_type!r} is not supported; megarl knows {', '.join(sorted(FAMILIES))}"
        )
    return family(hf_config)


def declare_critic(hf_config: Any) -> Declaration:
    """The weights of a critic: the same body with a value head [1, hidden] in place of the output layer."""
    head = Whole(VALUE_HEAD, Names("output_layer.weight", ""), (1, hf_config.hidden_size))
    return replace(declare(hf_config), head=head)


def declare_role(role: str, hf_config: Any) -> Declaration:
    """The weights of a role: critic and reward model have a value head, all others are causal language models."""
    return declare_critic(hf_config) if role in VALUE_ROLES else declare(hf_config)
