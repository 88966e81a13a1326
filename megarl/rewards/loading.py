"""Find a reward function by name, and call it so that its failure is a score of 0 with a reason.

A reward function is called as

    function(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float | {"score": float, ...}

by position: the order of verl's compute_score, whose functions work here as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from megarl.rewards import exact, gsm8k, prefix

RewardFunction = Callable[[str, str, str, dict[str, Any]], Any]
"""Gives a number, or a mapping with a number under "score"."""

BUILTIN: dict[str, RewardFunction] = {
    "gsm8k": gsm8k.score,
    "gsm8k_flexible": gsm8k.score_flexible,
    "exact": exact.score,
    "prefix": prefix.score,
}


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """The reward function called `name`: one of BUILTIN, or "package.module:function" from the Python path.

    options: keyword arguments to give to every call (gsm8k takes method and format_score).

    Raises ValueError when the name is neither, the module is not found or fails on import, it has no such attribute,
    the attribute is not callable, or it cannot be called with the four arguments and the options."""
    function = BUILTIN[name] if name in BUILTIN else _import_function(name)
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
    return functools.partial(function, **options) if options else function


def _import_function(name: str) -> RewardFunction:
    module_name, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(
            f"unknown reward function {name!r}; give {', '.join(BUILTIN)}, or your own as package.module:function "
            f"(not a file's path: put its folder on PYTHONPATH)"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"reward function {name!r}: there is no module {error.name!r}; put the folder that holds it on "
                f"PYTHONPATH"
            ) from error
        raise ValueError(
            f"reward function {name!r}: {module_name} imports {error.name!r}, which is not installed"
        ) from error
    except Exception as error:
        raise ValueError(f"reward function {name!r}: importing {module_name} failed: {_describe(error)}") from error
    if not hasattr(module, attribute):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"reward function {name!r}: {module_name} has no {attribute!r}; it has {', '.join(there) or 'no functions'}"
        )
    function: Any = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"reward function {name!r}: is a {type(function).__name__}, which cannot be called")
    checked: RewardFunction = function
    return checked


def score_safely(
    function: RewardFunction, data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> tuple[float, str | None]:
    """(score, None) of an answer, or (0.0, why) when the function raises or its result is no finite number.

    The function gets a copy of extra_info. Never raises, but for what is no Exception (KeyboardInterrupt, SystemExit).
    """
    try:
        result = function(data_source, response, ground_truth, dict(extra_info))
        return _to_score(result)
    except Exception as error:
        return 0.0, _describe(error)


def _to_score(result: Any) -> tuple[float, str | None]:
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "nothing"
            return 0.0, f"the reward function gave a mapping without 'score': it has {keys}"
        result = result["score"]
    if inspect.iscoroutine(result):
        result.close()
        return 0.0, "the reward function is asynchronous; give a plain function"
    if not isinstance(result, Real) and getattr(result, "shape", None) == ():
        result = result.item()  # a tensor or array of one number
    if not isinstance(result, Real):
        return 0.0, f"the reward function gave {_short(result)}, which is no number"
    score = float(result)
    if not math.isfinite(score):
        return 0.0, f"the reward function gave {score}, which is not finite"
    return score, None


def _describe(error: Exception) -> str:
    """The error with the line it came from: "ZeroDivisionError: division by zero (rewards.py:12)"."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
