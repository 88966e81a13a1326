"""Partial credit for the leading characters that agree."""

from __future__ import annotations

import pytest

from megarl.rewards import load_reward


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        ("8", "8", 1),
        (" 8\n", "8", 1),
        ("83", "8", 0.5),
        ("8", "83", 0.5),
        ("38", "8", 0),
        ("", "8", 0),
        ("1299", "1234", 0.5),
    ],
)
def test_scores(response, ground_truth, expected):
    assert load_reward("prefix")("s", response, ground_truth, {}) == expected
