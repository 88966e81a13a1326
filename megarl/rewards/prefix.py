"""Partial credit for the leading characters that are right: something to climb while exact matches are rare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """The number of leading characters that agree over the length of the longer text: 1.0 for the ground truth itself,
    0.5 for "8" followed by one wrong character where "8" is right. White space at either end does not count."""
    response, truth = response.strip(), ground_truth.strip()
    agreeing = next(
        (i for i, (a, b) in enumerate(zip(response, truth, strict=False)) if a != b), min(len(response), len(truth))
    )
    return agreeing / max(len(response), len(truth), 1)
