"""What is said of a field of a Hugging Face configuration that megarl would compute otherwise than its authors."""

from __future__ import annotations

import os
from typing import Any


def refusal(hf_config: Any, field: str, value: Any, expected: str) -> ValueError:
    """ValueError("hidden_act is 'gelu' in /models/x/config.json; megarl supports only silu")"""
    return ValueError(f"{field} is {value!r} in {config_file(hf_config)}; megarl supports only {expected}")


def config_file(hf_config: Any) -> str:
    return os.path.join(getattr(hf_config, "_name_or_path", "") or "", "config.json")
