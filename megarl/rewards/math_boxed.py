r"""MATH and its like: is the expression in the answer's last \boxed{} equal to the right one? By the library
math-verify.

Equal is what its `verify` calls equal: "0.5" for "\frac{1}{2}", "\{3, 1\}" for "1, 3". Simplifying what a model wrote
may take for ever (9^{9^{9^9}}), so this runs in the reward pool's processes, whose time limit takes the place of the
library's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

_BOX = r"\boxed"


def score(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    r"""1.0 when the response's last whole \boxed{...} equals the ground truth, else 0.0; also without a box.

    ground_truth: the right expression, or a whole solution, whose last \boxed{...} is taken.

    Raises ValueError when the ground truth is empty or ends in an empty box.
    """
    right = last_boxed(ground_truth)
    right = (ground_truth if right is None else right).strip()
    if not right:
        raise ValueError(f"ground_truth {ground_truth[-80:]!r} has no answer in it")
    answer = last_boxed(response)
    if answer is None or not answer.strip():
        return 0.0
    if answer.strip() == right:
        return 1.0
    return float(verify(_parsed(right), _parsed(answer), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...} that is closed, or None: last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}") is
    r"\frac{1}{2}". Braces with a backslash before them are characters."""
    start = len(text)
    while (start := text.rfind(_BOX, 0, start)) >= 0:
        rest = text[start + len(_BOX) :].lstrip()
        if rest.startswith("{") and (content := _up_to_closing_brace(rest[1:])) is not None:
            return content
    return None


def _up_to_closing_brace(text: str) -> str | None:
    depth, i = 1, 0
    while i < len(text):
        if text[i] == "\\":
            i += 1  # what follows is escaped
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[:i]
        i += 1
    return None


def _parsed(expression: str) -> list[Any]:
    """What math-verify reads in an expression: of sympy's and, as it stands, text."""
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found: list[Any] = parse(f"{_BOX}{{{expression}}}", targets, parsing_timeout=None)
    return found
