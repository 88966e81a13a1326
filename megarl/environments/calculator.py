"""A calculator that the model calls by writing <calc>12*(3+4)</calc>: it is told 84 and goes on.

An answer without a call is the last one; the reward function scores it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megarl.environments.protocol import Prompted, SingleTurn, Step, with_system_text

MAX_LENGTH = 200
"""Characters of an expression."""

MAX_BITS = 256
"""Of numerator and denominator of every number on the way: 77 digits."""

DECIMALS = 6

TEXT = (
    "You have a calculator. To use it, write an expression between <calc> and </calc> and end your message there; the "
    "result comes in the next message. It knows numbers, parentheses and + - * / // % **. For example, after you write "
    "<calc>12*(3+4)</calc> you are told 84. When you need it no more, give your answer without <calc>."
)

_CALL = re.compile(r"<calc>([^<]*)</calc>")
_ALLOWED = re.compile(r"[0-9\s.+\-*/%()]*")


class Calculator(SingleTurn):
    """Pure, and ends within milliseconds for every answer."""

    def messages(self, prompt: Prompted) -> Prompted:
        return with_system_text(prompt, TEXT)

    def step(self, state: dict[str, Any], answer: str) -> Step:
        """The result of every call in the answer, one a line; done where there is none."""
        calls = _CALL.findall(answer)
        if not calls:
            return Step(state)
        return Step(state, "\n".join(map(calculate, calls)), done=False)


def calculate(expression: str) -> str:
    """The expression's value, exact where it is a whole number and otherwise with up to DECIMALS decimals (as many
    significant digits below 0.001), or "error: " and why there is none. $ and the commas in 1,000 are ignored.

    >>> calculate("$1,200 / (3 + 4)"), calculate("2**10"), calculate("0.1 + 0.2"), calculate("1/0")
    ('171.428571', '1024', '0.3', 'error: division by zero')
    """
    try:
        return _to_text(_evaluate(_parse(expression)))
    except ZeroDivisionError:
        return "error: division by zero"
    except _NoResult as error:
        return f"error: {error}"


class _NoResult(Exception):
    """str() is what the model is told."""


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise _NoResult(f"the expression is longer than {MAX_LENGTH} characters")
    text = re.sub(r"(?<=[0-9]),(?=[0-9])|\$", "", expression)
    if not _ALLOWED.fullmatch(text):
        raise _NoResult("only numbers, parentheses and + - * / // % ** are allowed")
    try:
        return ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _NoResult("not an expression") from None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(repr(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        operation = _OPERATIONS.get(type(node.op))
        if operation is not None:
            return _bounded(operation(left, right))
    raise _NoResult("not an expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        if (_bits(base) - 1) * abs(exponent) > MAX_BITS:  # before it is computed
            raise _NoResult(_TOO_LARGE)
        return Fraction(base ** int(exponent))
    try:
        return Fraction(operator.pow(float(base), float(exponent)))
    except OverflowError:
        raise _NoResult(_TOO_LARGE) from None
    except TypeError:  # of a negative number: it is complex
        raise _NoResult("no such power") from None


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_TOO_LARGE = "the numbers get too large"


def _bounded(number: Fraction) -> Fraction:
    if _bits(number) > MAX_BITS:
        raise _NoResult(_TOO_LARGE)
    return number


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _to_text(number: Fraction) -> str:
    if 0 < abs(number) < Fraction(1, 1000):
        return f"{float(number):.{DECIMALS}g}"
    scaled = round(abs(number) * 10**DECIMALS)
    whole, decimals = divmod(scaled, 10**DECIMALS)
    text = f"{whole}.{decimals:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if number < 0 else text
