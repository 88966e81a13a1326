"""Multiple choice: is the letter that the answer gives the right one?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MARKS = r"[\s*_$\"'(\[{]*+"
"""What may stand between "answer is" and the letter: emphasis, quotes, brackets."""
_TEXT = r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?"

# Repetitions next to each other are possessive (*+): what one has taken it does not give back to the next, so that the
# time is linear in the response's length.
_RULES = (
    re.compile(rf"\\boxed\s*\{{\s*{_TEXT}[(\[]?([A-J])[)\].:]?\s*\}}", re.IGNORECASE),
    re.compile(
        rf"(?i:\banswer\b[*_\s]*+(?:is\b[*_\s]*+)?[:=]?){_MARKS}(?i:\\boxed|(?:option|choice)\b)?{_MARKS}{_TEXT}"
        r"([A-J]|[a-j](?![ \t]++\w))(?!['’]?\w)"
    ),
    re.compile(r"[(\[]([A-J])[)\]]", re.IGNORECASE),
)
_LAST_LINE = re.compile(r"[ \t*_]*+([A-J])(?:[*_]*+[.):].*|[ \t*_]*+)", re.IGNORECASE)


def score(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1.0 when the response's letter (`extract_letter`) is the ground truth's, else 0.0. Upper and lower case are the
    same; the ground truth may be "C", "c", "(C)" or "C.".

    Raises ValueError when the ground truth is no letter from A to J.
    """
    right = ground_truth.strip("()[]. \t\n").upper()
    if not re.fullmatch("[A-J]", right):
        raise ValueError(f"ground_truth {ground_truth[:80]!r} is not a letter from A to J")
    return 1.0 if extract_letter(response) == right else 0.0


def extract_letter(response: str) -> str | None:
    r"""The letter from A to J that the response gives as its answer, in upper case, or None.

    The first of these that is there, and of several its last:
    1. a box: "\boxed{C}", "\boxed{\text{(C)}}"
    2. the word answer: "Answer: C", "the answer is **C**", "the answer is (c)". A small letter before another word is a
       word itself: "the answer is a bird" gives none.
    3. brackets: "(C)", "[C]"
    4. a last line that is the letter, or begins with it: "C", "C) Paris", "C. Paris"
    """
    for rule in _RULES:
        found = rule.findall(response)
        if found:
            return str(found[-1]).upper()
    line = _LAST_LINE.fullmatch(response.rstrip().rpartition("\n")[2])
    return line[1].upper() if line else None
