"""Find an environment by name, and check that it is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megarl.environments.calculator import Calculator
from megarl.environments.protocol import Environment, Prompted
from megarl.rewards.loading import describe, import_named

BUILTIN: dict[str, Callable[[], Environment]] = {"calculator": Calculator}
"""Ready-made ones are pure, take milliseconds and end for every input: they need no process of their own."""


def load_environment(name: str) -> Environment:
    """The environment called `name`: one of BUILTIN, or "package.module:name" from the Python path, a class that is
    made without arguments or an object.

    Raises ValueError when the name is neither, the module is not found or fails on import, it has no such attribute,
    the class cannot be made, or it cannot be called as protocol.py says."""
    if name in BUILTIN:
        return BUILTIN[name]()
    found = import_named(name, "environment", BUILTIN, "package.module:name")
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise ValueError(
                f"environment {name!r}: making one without arguments failed: {describe(error)}; give the name of an "
                f"object that is made already"
            ) from error
    for method, arguments in (("reset", "data_source, ground_truth, extra_info"), ("step", "state, answer")):
        _check_method(name, found, method, arguments)
    if getattr(found, "messages", None) is not None:
        _check_method(name, found, "messages", "prompt")
    checked: Environment = found
    return checked


def _check_method(name: str, environment: Any, method: str, arguments: str) -> None:
    function = getattr(environment, method, None)
    if not callable(function):
        raise ValueError(
            f"environment {name!r}: is a {type(environment).__name__} without the method {method}({arguments})"
        )
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise ValueError(
            f"environment {name!r}: {method} cannot be called as {method}({arguments}): {error}"
        ) from error
    except ValueError:
        pass  # some callables written in C have no signature to look at


def prompt_messages(name: str, environment: Environment, prompt: Prompted) -> Prompted:
    """The prompt as the environment (called `name`) wants the model to be told it.

    Raises ValueError when its `messages` fails, or gives another type or what are no messages."""
    change = getattr(environment, "messages", None)
    if change is None:
        return prompt
    given = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
    try:
        found = change(given)
    except Exception as error:
        raise ValueError(f"environment {name!r}: messages failed: {describe(error)}") from error
    if isinstance(prompt, str):
        is_right = isinstance(found, str) and bool(found)
    else:
        is_right = isinstance(found, list) and bool(found) and all(map(_is_message, found))
    if not is_right:
        wanted = "a text" if isinstance(prompt, str) else "a list of messages with the texts role and content"
        raise ValueError(f"environment {name!r}: messages gave {str(found)[:80]!r}, but must give {wanted}")
    changed: Prompted = found
    return changed


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
