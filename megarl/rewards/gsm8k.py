"""GSM8K: is the number that the answer ends on the right one? (Cobbe et al., arXiv:2110.14168)"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_NUMBER = r"-?\$?-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_STRICT = re.compile(rf"####[ \t]*({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def score(
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1.0 when the response's number equals the ground truth, `format_score` when it is another number, 0.0 when there
    is none.

    "strict" takes the number after the last "####" that has one on its line; "flexible" the last number of the
    response. Commas and dollar signs are dropped, and numbers are compared as numbers: "#### $1,234.00" is right for
    "1234".

    Raises ValueError when the ground truth is no number or `method` is neither word.
    """
    right = _to_number(ground_truth)
    if right is None:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    number = extract_number(response, method)
    if number is None:
        return 0.0
    return 1.0 if number == right else format_score


def score_flexible(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """`score` with method="flexible"."""
    return score(data_source, response, ground_truth, extra_info, method="flexible")


def extract_number(response: str, method: Literal["strict", "flexible"] = "strict") -> Decimal | None:
    """The number that the response gives as its answer (see `score`), or None. extract_number("#### $1,200") ==
    1200."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}; it must be strict or flexible")
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(response)
    return _to_number(found[-1]) if found else None


def _to_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
