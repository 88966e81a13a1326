"""Text equality but for white space at either end."""

from __future__ import annotations

import pytest

from megarl.rewards import load_reward


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [("8", "8", 1), (" 8\n", "8", 1), ("8", "8 ", 1), ("08", "8", 0), ("8 8", "88", 0), ("", "8", 0), ("a", "A", 0)],
)
def test_scores(response, ground_truth, expected):
    assert load_reward("exact")("s", response, ground_truth, {}) == expected
