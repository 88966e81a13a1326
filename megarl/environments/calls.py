"""One call of an environment: made in a worker's process, where its result becomes what JSON can hold, and read in the
owner's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.environments.loading import load_environment
from megarl.environments.protocol import ROLES, Environment, Step
from megarl.rewards.loading import NoNumber, awaited, describe, finite_number, short

Call = tuple[str, tuple[Any, ...]]
"""("reset", (data_source, ground_truth, extra_info)) or ("step", (state, answer))."""


def open_environment(name: str) -> tuple[Callable[[Sequence[Call]], list[tuple[Any, str | None]]], int]:
    """What a worker's process (rewards/keeper.py) calls: answers of one call at a time."""
    environment = load_environment(name)
    return lambda calls: [make(environment, call) for call in calls], 0


def make(environment: Environment, call: Call) -> tuple[Any, str | None]:
    """(what JSON can hold, None), or (None, why the environment failed). `read` makes a result of it.

    The environment gets copies. Never raises, but for what is no Exception (KeyboardInterrupt, SystemExit)."""
    method, arguments = call
    try:
        copies = [dict(argument) if isinstance(argument, Mapping) else argument for argument in arguments]
        found = awaited(getattr(environment, method)(*copies))
        value = _state(found) if method == "reset" else _step(found)
        return json.loads(json.dumps(value, allow_nan=False)), None
    except _Wrong as error:
        return None, f"the environment's {method} gave {error}"
    except Exception as error:
        return None, describe(error)


def read(call: Call, value: Any) -> dict[str, Any] | Step:
    """The result of a call: a state of "reset", a Step of "step".

    Raises an exception of any kind where the value is none: a worker may have been tampered with."""
    if call[0] == "reset":
        return _state(value)
    return Step(**_step(Step(**{**value, "state": _state(value["state"])})))


class _Wrong(Exception):
    """str() is what an environment gave, and what it should have given."""


def _step(found: Any) -> dict[str, Any]:
    if not isinstance(found, Step):
        raise _Wrong(f"{short(found)}, which is no Step")
    if not isinstance(found.observation, str):
        raise _Wrong(f"the observation {short(found.observation)}, which is no text")
    if found.role not in ROLES:
        raise _Wrong(f"the role {short(found.role)}, which is none of {', '.join(ROLES)}")
    if found.done not in (True, False):
        raise _Wrong(f"done = {short(found.done)}, which is neither True nor False")
    return {
        "state": _state(found.state),
        "observation": found.observation.encode(errors="replace").decode(),  # half a character has no tokens
        "reward": None if found.reward is None else _reward(found.reward),
        "done": bool(found.done),
        "role": found.role,
    }


def _reward(reward: Any) -> float:
    try:
        return finite_number(reward)
    except NoNumber as error:
        raise _Wrong(f"the reward {error}") from None


def _state(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise _Wrong(f"the state {short(state)}, which is no mapping")
    try:
        json.dumps(dict(state), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Wrong(f"the state {short(state)}, which JSON cannot hold: {error}") from None
    _check_keys(state)
    return dict(state)


def _check_keys(value: Any) -> None:
    """JSON would make texts of other keys."""
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise _Wrong(f"a state with the key {short(wrong)}, which is no text")
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_keys(item)
