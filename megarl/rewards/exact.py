"""The answer must be the ground truth, letter for letter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1.0 when response and ground truth are the same text but for white space at either end, else 0.0."""
    return 1.0 if response.strip() == ground_truth.strip() else 0.0
