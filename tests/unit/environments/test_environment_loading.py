"""Environments by name, and what they tell the model first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import SingleTurn, Step, load_environment, prompt_messages
from megarl.environments.calculator import Calculator

MODULE = """
from megarl.environments import SingleTurn, Step

class Guess:
    def __init__(self, tries=3):
        self.tries = tries
    def reset(self, data_source, ground_truth, extra_info):
        return {"left": self.tries}
    def step(self, state, answer):
        return Step(state)

short = Guess(1)

class Needy(Guess):
    def __init__(self, server):
        pass

class Broken(Guess):
    def __init__(self):
        1 / 0

class OnlyStep:
    def step(self, state, answer):
        return Step(state)

class TwoArguments(Guess):
    def reset(self, data_source, ground_truth):
        return {}

class OddMessages(Guess):
    messages = 3

def function(state, answer):
    return Step(state)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_tools", None)


def test_ready_made_a_class_and_an_object() -> None:
    assert isinstance(load_environment("calculator"), Calculator)
    assert load_environment("my_tools:Guess").reset("s", "8", {}) == {"left": 3}
    assert load_environment("my_tools:short").reset("s", "8", {}) == {"left": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculater", "unknown environment 'calculater'; give calculator, or your own as package.module:name"),
        ("my_tools.py:Guess", "environment 'my_tools.py:Guess': there is no module 'my_tools.py'"),
        ("tools/my_tools.py:Guess", "not a file's path"),
        ("my_tools:Gues", "environment 'my_tools:Gues': my_tools has no 'Gues'; it has .*Guess"),
        ("my_tools:Needy", r"making one without arguments failed: TypeError: .*'server'.*give the name of an object"),
        ("my_tools:Broken", r"failed: ZeroDivisionError: division by zero \(my_tools\.py:20\)"),
        ("my_tools:OnlyStep", r"is a OnlyStep without the method reset\(data_source, ground_truth, extra_info\)"),
        ("my_tools:function", r"is a function without the method reset"),
        (
            "my_tools:TwoArguments",
            r"reset cannot be called as reset\(data_source, ground_truth, extra_info\): too many",
        ),
        ("my_tools:OddMessages", r"without the method messages\(prompt\)"),
    ],
)
def test_what_cannot_be_had_is_said(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_environment(name)


def test_the_example_in_the_docs_works() -> None:
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    scope: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    guess = scope["Guess"]()
    state = guess.reset("s", "7", {})
    second = guess.step(state, "6")
    assert (second.done, second.observation, second.reward) == (False, "Wrong, try again.", None)
    assert guess.step(second.state, " 7\n") == Step(second.state, reward=1.0)
    last = guess.step(guess.step(second.state, "5").state, "4")
    assert (last.done, last.reward) == (True, 0.0)
    assert prompt_messages("guess", guess, CHAT)[1:] == CHAT


class Telling(SingleTurn):
    def __init__(self, told: Any) -> None:
        self.told = told

    def messages(self, prompt: Any) -> Any:
        return self.told(prompt)


CHAT = [{"role": "user", "content": "q"}]


def test_an_environment_changes_what_the_model_is_told() -> None:
    more = Telling(lambda prompt: [*prompt, {"role": "user", "content": "!"}])
    assert prompt_messages("e", more, CHAT) == [*CHAT, {"role": "user", "content": "!"}]
    assert prompt_messages("e", Telling(str.upper), "abc") == "ABC"
    assert prompt_messages("e", SingleTurn(), CHAT) == CHAT
    assert prompt_messages("e", load_environment("my_tools:Guess"), "abc") == "abc"


def test_one_that_changes_messages_in_place_leaves_the_data_alone() -> None:
    def change(prompt: Any) -> Any:
        prompt[0]["content"] = "changed"
        return prompt

    own = [dict(CHAT[0])]
    assert prompt_messages("e", Telling(change), own) == [{"role": "user", "content": "changed"}]
    assert own == CHAT


@pytest.mark.parametrize(
    ("prompt", "told", "message"),
    [
        ("q", lambda prompt: CHAT, "messages gave .* but must give a text"),
        ("q", lambda prompt: "", "must give a text"),
        (CHAT, lambda prompt: "q", "messages gave 'q', but must give a list of messages"),
        (CHAT, lambda prompt: [], "must give a list of messages"),
        (CHAT, lambda prompt: [{"role": "user"}], "must give a list of messages with the texts role and content"),
        (CHAT, lambda prompt: None, "messages gave 'None'"),
        (CHAT, lambda prompt: prompt[3], r"environment 'e': messages failed: IndexError: .*\(test_environment_loading"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, told: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_messages("e", Telling(told), prompt)
