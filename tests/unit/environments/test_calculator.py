"""A calculator that cannot be made to do anything else."""

from __future__ import annotations

import doctest
import random
from fractions import Fraction
from typing import Any

import pytest

from megarl.environments import Step, calculator
from megarl.environments.calculator import MAX_BITS, MAX_LENGTH, TEXT, Calculator, calculate


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*(3+4)", "84"),
        (" 2 +\n 3 ", "5"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 - -2", "9"),
        ("+3", "3"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("9 ** 0.5", "3"),
        ("$1,250.50 * 2", "2501"),
        ("1,000,000 + 1", "1000001"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3 * 3", "1"),
        ("2 / 3", "0.666667"),
        ("-2 / 3", "-0.666667"),
        ("1999999.9999999 * 1", "2000000"),
        ("1 / 3000", "0.000333333"),
        ("0 * -1", "0"),
        (".5 + 1.", "1.5"),
        ("123456789012345678901234567890 + 1", "123456789012345678901234567891"),
        ("7.5 // 2", "3"),
        ("(-1) ** 123456789012345678901234567890", "1"),
    ],
)
def test_what_it_computes(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an expression"),
        ("1 +", "not an expression"),
        ("(1", "not an expression"),
        ("3(4)", "not an expression"),
        ("()", "not an expression"),
        ("...", "not an expression"),
        ("007", "not an expression"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("0 ** -0.5", "division by zero"),
        ("(-8) ** 0.5", "no such power"),
        ("10 ** 400.5", "the numbers get too large"),
        ("2 ** 1000", "the numbers get too large"),
        ("9**9**9**9**9", "the numbers get too large"),
        ("(1/3) ** 200", "the numbers get too large"),
        ("9" * 100, "the numbers get too large"),
        ("1" + "+1" * 100, f"the expression is longer than {MAX_LENGTH} characters"),
        ("__import__('os')", "only numbers, parentheses and + - * / // % ** are allowed"),
        ("1 if 1 else 2", "only numbers, parentheses and + - * / // % ** are allowed"),
        ("1, 2", "only numbers, parentheses and + - * / // % ** are allowed"),
        ("12 apples", "only numbers, parentheses and + - * / // % ** are allowed"),
        ("1e5", "only numbers, parentheses and + - * / // % ** are allowed"),
        ("٣ + 1", "only numbers, parentheses and + - * / // % ** are allowed"),
    ],
)
def test_what_it_refuses(expression: str, reason: str) -> None:
    assert calculate(expression) == f"error: {reason}"


def test_numbers_stay_within_their_bound() -> None:
    assert calculate(f"2 ** {MAX_BITS - 1}") == str(2 ** (MAX_BITS - 1))
    assert calculate(f"2 ** {MAX_BITS}") == "error: the numbers get too large"
    assert calculate(f"2 ** {MAX_BITS - 1} * 2") == "error: the numbers get too large"


def test_every_text_of_its_characters_has_a_short_answer() -> None:
    """Soon: numbers that are not bounded would take for ever, and the test with them."""
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choice("0123456789.+-*/%() ") for _ in range(draw.randrange(1, MAX_LENGTH)))
        assert len(calculate(text)) < 100
    for text in ("-" * 199 + "1", "(" * 100 + "1" + ")" * 99, "9**" * 66 + "9", "~1", "9%" * 66 + "7"):
        assert len(calculate(text)) < 100


def test_expressions_have_the_value_of_exact_fractions() -> None:
    """A tree that is drawn, written with all its parentheses, and computed beside."""
    draw = random.Random(5)

    def tree(depth: int) -> tuple[str, Fraction]:
        if depth == 0:
            number = Fraction(draw.randrange(1, 2000), draw.choice([1, 1, 10, 100]))
            return (str(number) if number.denominator == 1 else str(float(number))), number
        (left, a), (right, b) = tree(depth - 1), tree(depth - 1)
        sign = draw.choice("+-*")
        return f"({left}{sign}{right})", {"+": a + b, "-": a - b, "*": a * b}[sign]

    for _ in range(200):
        text, value = tree(draw.randrange(4))
        found = calculate(text)
        assert abs(Fraction(found) - value) <= max(Fraction(1, 2_000_000), abs(value) / 10**5 if abs(value) < 1 else 0)


def test_the_docstrings_examples_hold() -> None:
    assert doctest.testmod(calculator).failed == 0


# ------------------------------------------------------------------------------------------------ as an environment


def test_a_call_is_answered_and_an_answer_without_one_is_the_last() -> None:
    environment = Calculator()
    state = environment.reset("s", "84", {})
    assert environment.step(state, "I need <calc>12*(3+4)</calc>") == Step(state, "84", None, False, "tool")
    assert environment.step(state, "It is 84.") == Step(state, "", None, True)
    assert environment.step(state, "<calc>1+1").done
    assert environment.step(state, "1+1</calc>").done


def test_every_call_has_its_line() -> None:
    step = Calculator().step({}, "<calc>1+1</calc>, <calc>1/0</calc> <calc></calc>\n<calc>\n$3,000\n</calc>")
    assert step.observation.split("\n") == ["2", "error: division by zero", "error: not an expression", "3000"]


def test_a_hundred_thousand_openings_are_no_call() -> None:
    """Looking for each one's end through all the text would take hours."""
    assert Calculator().step({}, "<calc>" * 100_000).done


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("3+4=", f"{TEXT}\n\n3+4="),
        (
            [{"role": "user", "content": "q"}],
            [{"role": "system", "content": TEXT}, {"role": "user", "content": "q"}],
        ),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}],
            [{"role": "system", "content": f"{TEXT}\n\nBe brief."}, {"role": "user", "content": "q"}],
        ),
    ],
)
def test_the_model_is_told_of_it_first(prompt: Any, expected: Any) -> None:
    before = repr(prompt)
    assert Calculator().messages(prompt) == expected
    assert repr(prompt) == before


def test_what_the_model_is_told_is_true() -> None:
    """The example in the text."""
    assert "<calc>12*(3+4)</calc>" in TEXT
    assert f"told {calculate('12*(3+4)')}." in TEXT
