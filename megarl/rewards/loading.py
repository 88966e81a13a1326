"""Find a reward function by name, and call it so that its failure is a score of 0 with a reason.

A reward function is called as

    function(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float | {"score": float, ...}

by position: the order of verl's compute_score, whose functions work here as they are. It may be an `async def`. A
function with an attribute batch_size gets up to so many answers at once, each argument a list, and gives one score for
each:

    def score(data_sources, responses, ground_truths, extra_infos):
        return [...]

    score.batch_size = 64

It may be async too: that is how many calls to a judge are in flight at once. One that raises fails its whole batch.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from megarl.rewards import choice, exact, gsm8k, prefix

RewardFunction = Callable[[str, str, str, dict[str, Any]], Any]
"""Gives a number, or a mapping with a number under "score"."""

BUILTIN: dict[str, RewardFunction] = {
    "gsm8k": gsm8k.score,
    "gsm8k_flexible": gsm8k.score_flexible,
    "exact": exact.score,
    "prefix": prefix.score,
    "choice": choice.score,
}

TRUSTED = frozenset(BUILTIN)
"""Ready-made functions that are pure, take microseconds and end for every input: they need no process of their own."""

IN_PROCESSES = {"math": "megarl.rewards.math_boxed:score", "code": "megarl.rewards.code:score"}
"""Ready-made functions that may not end, or import much: they run where the user's own do."""

READY_MADE = (*BUILTIN, *IN_PROCESSES)

Call = tuple[str, str, str, Mapping[str, Any]]
"""data_source, response, ground_truth, extra_info of one answer."""

Score = tuple[float, str | None]
"""(score, None), or (0.0, why the reward failed)."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """The reward function called `name`: one of READY_MADE, or "package.module:function" from the Python path.

    options: keyword arguments to give to every call (gsm8k takes method and format_score, code takes partial).

    Raises ValueError when the name is neither, the module is not found or fails on import, it has no such attribute,
    the attribute is not callable, or it cannot be called with the four arguments and the options."""
    function = BUILTIN.get(name)
    if function is None:
        function = import_named(IN_PROCESSES.get(name, name), "reward function", READY_MADE, "package.module:function")
        if not callable(function):
            raise ValueError(f"reward function {name!r}: is a {type(function).__name__}, which cannot be called")
    options = dict(options or {})
    try:
        inspect.signature(function).bind("", "", "", {}, **options)
    except TypeError as error:
        raise ValueError(
            f"reward function {name!r} cannot be called as function(data_source, response, ground_truth, extra_info"
            f"{''.join(f', {option}=...' for option in options)}): {error}"
        ) from error
    except ValueError:
        pass  # some callables written in C have no signature to look at
    if not options:
        return function
    bound = functools.partial(function, **options)
    if hasattr(function, "batch_size"):
        bound.batch_size = function.batch_size  # type: ignore[attr-defined]
    return bound


def import_named(name: str, subject: str, ready_made: Iterable[str], form: str) -> Any:
    """What "package.module:attribute" names on the Python path.

    Args:
        subject: what it is called in errors: "reward function".
        ready_made: names that could have been given instead.
        form: how the user's own are written: "package.module:function".

    Raises:
        ValueError: the name is not of this form, the module is not found or fails on import, or it has no such
            attribute.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(
            f"unknown {subject} {name!r}; give {', '.join(ready_made)}, or your own as {form} (not a file's path: put "
            f"its folder on PYTHONPATH)"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{subject} {name!r}: there is no module {error.name!r}; put the folder that holds it on PYTHONPATH"
            ) from error
        raise ValueError(f"{subject} {name!r}: {module_name} imports {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ValueError(f"{subject} {name!r}: importing {module_name} failed: {describe(error)}") from error
    if not hasattr(module, attribute):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{subject} {name!r}: {module_name} has no {attribute!r}; it has {', '.join(there) or 'no functions'}"
        )
    return getattr(module, attribute)


def open_reward(name: str, **options: Any) -> tuple[Callable[[Sequence[Call]], list[Score]], int]:
    """What a worker process (keeper.py) calls: scores of many answers, and how many it takes at once."""
    function = load_reward(name, options)
    return functools.partial(score_many, function), int(getattr(function, "batch_size", 0))


def score_safely(
    function: RewardFunction, data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> Score:
    """(score, None) of an answer, or (0.0, why) when the function raises or its result is no finite number.

    The function gets a copy of extra_info. Never raises, but for what is no Exception (KeyboardInterrupt, SystemExit).
    """
    try:
        return _to_score(awaited(function(data_source, response, ground_truth, dict(extra_info))))
    except Exception as error:
        return 0.0, describe(error)


def score_many(function: RewardFunction, calls: Sequence[Call]) -> list[Score]:
    """`score_safely` of each answer, or of all in one call where the function has a batch_size."""
    if not getattr(function, "batch_size", 0):
        return [score_safely(function, *call) for call in calls]
    sources, responses, truths, infos = (list(values) for values in zip(*calls, strict=True))
    whole: Any = function
    try:
        results = list(awaited(whole(sources, responses, truths, [dict(info) for info in infos])))
        if len(results) == len(calls):
            return [_to_score_safely(result) for result in results]
        reason = f"the reward function gave {len(results)} scores for {len(calls)} answers"
    except Exception as error:
        reason = describe(error)
    return [(0.0, reason)] * len(calls)


def awaited(result: Any) -> Any:
    """The result, waited for where it is a coroutine's."""
    return _loop().run_until_complete(result) if hasattr(result, "__await__") else result


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, so that a function may keep its connections."""
    return asyncio.new_event_loop()


def _to_score_safely(result: Any) -> Score:
    try:
        return _to_score(result)
    except Exception as error:
        return 0.0, describe(error)


def _to_score(result: Any) -> Score:
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "nothing"
            return 0.0, f"the reward function gave a mapping without 'score': it has {keys[:300]}"
        result = result["score"]
    try:
        return finite_number(result), None
    except NoNumber as error:
        return 0.0, f"the reward function gave {error}"


class NoNumber(ValueError):
    """str() is what was given, and what is wrong with it."""


def finite_number(value: Any) -> float:
    """The value of a number, or of a tensor or array of one.

    Raises:
        NoNumber: it is none, or not finite.
    """
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        raise NoNumber(f"{short(value)}, which is no number")
    number = float(value)
    if not math.isfinite(number):
        raise NoNumber(f"{number}, which is not finite")
    return number


def describe(error: Exception) -> str:
    """The error's first line with the line it came from: "ZeroDivisionError: division by zero (rewards.py:12)"."""
    lines = str(error).splitlines()
    text = f"{type(error).__name__}: {lines[0][:300] if lines else ''}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def short(value: Any) -> str:
    """Its repr, for errors, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
