"""GSM8K's rule: the number after the last "####"."""

from __future__ import annotations

import pytest

from megarl.rewards import load_reward
from megarl.rewards.gsm8k import extract_number, score

# response, ground truth, strict, flexible
CASES = [
    ("so #### 72", "72", 1, 1),
    ("#### 71", "72", 0, 0),
    ("#### 10 no, wait: #### 72", "72", 1, 1),
    ("#### 72 no, wait: #### 10", "72", 0, 0),
    ("#### 1,234", "1234", 1, 1),
    ("#### 1234", "1,234", 1, 1),
    ("#### $72", "72", 1, 1),
    ("#### -$5", "-5", 1, 1),
    ("#### $-5", "-5", 1, 1),
    ("#### 72.00", "72", 1, 1),
    ("The answer is 72. #### 72.", "72", 1, 1),
    ("#### 7.25", "7.25", 1, 1),
    ("#### 7.2", "7", 0, 0),
    ("#### .5", "0.5", 1, 1),
    ("####72", "72", 1, 1),
    ("#### 72 dollars", "72", 1, 1),
    ("#### 72 ####", "72", 1, 1),
    ("#### 5 for each of the 3", "5", 1, 0),
    ("The answer is 72", "72", 0, 1),
    ("#### the answer is 72", "72", 0, 1),
    ("####\n3 more lines", "3", 0, 1),
    ("#### no number", "72", 0, 0),
    ("", "72", 0, 0),
    ("####", "72", 0, 0),
    ("#### 072", "72", 1, 1),
    ("#### -72", "72", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "strict", "flexible"), CASES)
def test_scores(response, ground_truth, strict, flexible):
    assert load_reward("gsm8k")("openai/gsm8k", response, ground_truth, {}) == strict
    assert load_reward("gsm8k_flexible")("openai/gsm8k", response, ground_truth, {}) == flexible


def test_a_wrong_number_in_the_right_form_may_count_for_something():
    reward = load_reward("gsm8k", {"format_score": 0.1})
    assert [reward("s", response, "72", {}) for response in ("#### 72", "#### 71", "71")] == [1.0, 0.1, 0.0]


def test_numbers_are_exact():
    assert score("s", "#### 12345678901234567891", "12345678901234567890", {}) == 0.0
    assert extract_number("#### 0.1") * 3 == extract_number("#### 0.3")


def test_a_ground_truth_that_is_no_number_and_a_wrong_method_are_errors():
    with pytest.raises(ValueError, match="ground_truth 'many' is not a number"):
        score("s", "#### 72", "many", {})
    with pytest.raises(ValueError, match="method is 'loose'"):
        score("s", "#### 72", "72", {}, method="loose")
