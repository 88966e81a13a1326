"""What an environment is: a start, and an answer to each turn of the model.

    class Guess:
        def reset(self, data_source, ground_truth, extra_info):
            return {"number": int(ground_truth), "left": 3}

        def step(self, state, answer):
            left = state["left"] - 1
            if answer.strip() == str(state["number"]):
                return Step(state, reward=1.0)
            if left == 0:
                return Step(state, reward=0.0)
            return Step({**state, "left": left}, "Wrong, try again.", done=False, role="user")

It keeps nothing: the state goes in and comes out, as what JSON can hold, so that each step may run in another process,
under a time limit, and an answer that was stopped goes on anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Prompted = str | list[dict[str, str]]
"""A prompt as the data files have it: plain text, or messages with role and content."""

ROLES = ("tool", "user", "system")
"""Who may say an observation."""


@dataclass(frozen=True)
class Step:
    """What an environment does with a turn.

    Step({}, "84", done=False): the model is told 84 and writes its next turn. Step({}): the answer is over.
    """

    state: Mapping[str, Any]
    """For the next step: what JSON can hold, with texts for keys."""
    observation: str = ""
    """What the model is told before its next turn; of no use where the answer is done."""
    reward: float | None = None
    """An answer's score is the sum of these; with none in any step the reward function scores its last turn."""
    done: bool = True
    role: str = "tool"
    """Whose message the observation is: one of ROLES, "user" where the model's chat template does not know it."""


class Environment(Protocol):
    """Both methods may be `async def`. One that also has

        messages(prompt: str | list[dict[str, str]]) -> the same type

    changes what the model is told first, for each row of the data once, before it is tokenised.
    """

    def reset(self, data_source: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        """The state before the first turn of an answer; arguments are the row's."""

    def step(self, state: dict[str, Any], answer: str) -> Step:
        """What comes of a turn. answer: its text, without special tokens."""


class SingleTurn:
    """An environment that says nothing: a base for those that need only some of the methods."""

    def messages(self, prompt: Prompted) -> Prompted:
        return prompt

    def reset(self, data_source: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        return {}

    def step(self, state: dict[str, Any], answer: str) -> Step:
        return Step(state)


def with_system_text(prompt: Prompted, text: str) -> Prompted:
    """The prompt with a text before it: in its system message where it begins with one, else in a new one; plain text
    gets it as a paragraph of its own."""
    if isinstance(prompt, str):
        return f"{text}\n\n{prompt}"
    if prompt and prompt[0]["role"] == "system":
        return [{**prompt[0], "content": f"{text}\n\n{prompt[0]['content']}"}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]
