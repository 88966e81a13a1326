"""The letter that an answer gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.rewards import RewardPool, load_reward
from megarl.rewards.choice import extract_letter

LETTERS = [
    # a box
    (r"\boxed{C}", "C"),
    (r"so \boxed{\text{c}}", "C"),
    (r"\boxed{\textbf{(D)}}", "D"),
    (r"\boxed{(B)} hmm, \boxed{A}", "A"),
    (r"The answer is B. \boxed{C} Answer: D", "C"),
    (r"\boxed{Cat} Answer: D", "D"),
    (r"\boxed{K} (B)", "B"),
    # the word answer
    ("Answer: C", "C"),
    ("ANSWER: c", "C"),
    ("The answer is C.", "C"),
    ("The correct answer is (j), as said", "J"),
    ("**Answer:** B", "B"),
    ("Answer: **E**", "E"),
    ("The answer is **option F**.", "F"),
    ("The final answer is $\\boxed D$", "D"),
    ("the answer is\n\nB", "B"),
    ("The answer is C because A is wrong", "C"),
    ("Answer: A. No: Answer: B. (C)", "B"),
    ("Answer: 'G'", "G"),
    ("the answer is a bird", None),
    ("the answer is a", "A"),
    ("Answer: Cats", None),
    ("Answer: C3", None),
    ("Answer: K", None),
    ("the answers A and B", None),
    # brackets
    ("It is (A), or rather (c)", "C"),
    ("[D]", "D"),
    ("(AB) and (k)", None),
    # the last line
    ("C", "C"),
    ("b.\n", "B"),
    ("Thinking about A\n**H**\n\n", "H"),
    ("I think\nC) Paris", "C"),
    ("D. 42", "D"),
    ("C\nor so", None),
    ("A bird", None),
    ("", None),
    ("42", None),
]


@pytest.mark.parametrize(("response", "letter"), LETTERS)
def test_the_letter(response: str, letter: str | None) -> None:
    assert extract_letter(response) == letter


@pytest.mark.parametrize("gap", [" ", "\n", "\t", "_", "*", "$", "(", "* ", "_\n", " \n", "{ *_\n$"])
def test_ten_thousand_of_what_may_stand_between_take_no_time(gap: str) -> None:
    """With time that grows as the square or more, each of these took minutes; the worst of them years."""
    long = gap * (10_000 // len(gap))
    code = (
        "import sys\nfrom megarl.rewards.choice import extract_letter\nlong = sys.argv[1]\n"
        "for text in ('The answer', 'Answer:', 'The answer is', 'The answer is option', 'A.', 'A', '', 'A. x',\n"
        "             '\\\\boxed{', '\\\\boxed', 'answer \\\\text{'):\n"
        "    assert extract_letter(text + long + '\\n!?') is None, text\n"
        "    assert extract_letter((text + long) * 10 + '\\n!?') is None, text\n"
        "assert extract_letter('The answer is a' + long + '?!') in ('A', None)\n"
        "assert extract_letter('The answer:' + long + 'c.') == 'C'\n"
    )
    found = subprocess.run([sys.executable, "-c", code, long], timeout=60, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("ground_truth", ["C", "c", "(C)", "C.", " [c]\n"])
def test_right_is_the_same_letter(ground_truth: str) -> None:
    reward = load_reward("choice")
    assert [reward("s", response, ground_truth, {}) for response in ("Answer: c", "Answer: B", "no idea")] == [1, 0, 0]


@pytest.mark.parametrize("ground_truth", ["", "K", "CD", "2", "C or D"])
def test_a_ground_truth_that_is_no_letter_is_an_error(ground_truth: str) -> None:
    with pytest.raises(ValueError, match="is not a letter from A to J"):
        load_reward("choice")("s", "Answer: C", ground_truth, {})


def test_it_is_scored_on_the_spot() -> None:
    pool = RewardPool(["choice"], 1, 1.0, 256)
    assert pool.submit("choice", ("s", "Answer: C", "C", {})).result(timeout=0) == (1.0, None)
    pool.close()
