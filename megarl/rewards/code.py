r"""Code: does the program in the answer pass the tests? Run by sandbox.py, a process a test.

The program is the answer's last closed block between ```python and ```. The ground truth is JSON:

    {"tests": ["assert add(1, 2) == 3", ...]}           each run by itself after the program
    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}  stdin, and what stdout must be

and may have "seconds" for a test (4 without). Expected output is what is written in the test, never in the sandbox; an
assertion shares its interpreter with the program, and one that is made to deceive it can.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.rewards import sandbox
from megarl.rewards.sandbox import Limits

LIMITS = Limits(seconds=4.0)
"""Of one test."""

_BLOCK = re.compile(r"(?ims)^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$")

# The module's name is not __main__: what a program does when it is one is not wanted here. It ends with a code that
# neither sys.exit() nor an exception gives.
_HARNESS = """\
import os, sys, types
module = types.ModuleType("answer")
sys.modules["answer"] = module
exec(compile({program!r}, "answer.py", "exec"), module.__dict__)
exec(compile({test!r}, "test.py", "exec"), module.__dict__)
os._exit({passed})
"""


def score(
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    partial: bool = False,
    allow_unsandboxed: bool = False,
    time_limit: float = 8.0,
) -> float:
    """1.0 when the response's program passes all tests, else 0.0; with `partial` the share that it passes.

    Args:
        allow_unsandboxed: run the program with limits alone where it cannot be isolated.
        time_limit: seconds for all tests together; those that are left then have failed.

    Raises ValueError when the ground truth is not as above, or isolation is not to be had and not waived.
    """
    tests = read_tests(ground_truth)
    check_isolation(allow_unsandboxed)
    program = last_block(response)
    if program is None:
        return 0.0
    isolated = sandbox.isolation_problem() is None
    num_passed = 0
    for failure in failures(program, tests, isolated, time_limit):
        num_passed += failure is None
        if failure is not None and not partial:
            return 0.0
    return num_passed / len(tests.cases)


def check_isolation(allow_unsandboxed: bool) -> None:
    """Raises ValueError when programs cannot be isolated on this machine, unless that is allowed."""
    problem = sandbox.isolation_problem()
    if problem is not None and not allow_unsandboxed:
        raise ValueError(
            f"code of a model is not run without isolation ({problem}); allow user namespaces, or set "
            f"reward.allow_unsandboxed_code=true to run it with limits alone"
        )


@dataclass(frozen=True)
class Tests:
    cases: tuple[tuple[str, str], ...]
    """(stdin, expected stdout), or ("", the test's statements)."""
    are_programs: bool
    """The first kind."""
    seconds: float = LIMITS.seconds


def read_tests(ground_truth: str) -> Tests:
    """Raises ValueError when the ground truth is not as the module says."""
    try:
        found = json.loads(ground_truth)
    except ValueError as error:
        raise ValueError(f"ground_truth {ground_truth[:80]!r} is not JSON: {error}") from None
    keys = set(found) - {"seconds"} if isinstance(found, dict) else set()
    if keys not in ({"tests"}, {"inputs", "outputs"}):
        named = ", ".join(sorted(keys)) or type(found).__name__
        raise ValueError(f'ground_truth must have "tests", or "inputs" and "outputs", and may "seconds"; has {named}')
    lists = [found[key] for key in sorted(keys)]
    if not all(isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) for texts in lists):
        raise ValueError(f"ground_truth: {' and '.join(sorted(keys))} must be lists of texts, one at least")
    if len({len(texts) for texts in lists}) > 1:
        raise ValueError(f"ground_truth has {len(lists[0])} inputs and {len(lists[1])} outputs")
    seconds = found.get("seconds", LIMITS.seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"ground_truth: seconds is {seconds!r}, must be a number above 0")
    cases = tuple(zip(*lists, strict=True)) if len(lists) == 2 else tuple(("", test) for test in lists[0])
    return Tests(cases, len(lists) == 2, float(seconds))


def last_block(response: str) -> str | None:
    """The program in the response's last closed block of Python, or None."""
    found = _BLOCK.findall(response)
    return found[-1] if found else None


def failures(program: str, tests: Tests, isolated: bool, time_limit: float) -> Iterator[str | None]:
    """Of each test in turn, None where the program passes it, or why it does not."""
    end = time.monotonic() + time_limit
    for given, expected in tests.cases:
        seconds = min(tests.seconds, end - time.monotonic())
        if seconds <= 0:
            yield f"not tried: the tests before it took {time_limit:g} s"
        elif tests.are_programs:
            yield _output_failure(program, given, expected, replace(LIMITS, seconds=seconds), isolated)
        else:
            yield _test_failure(program, expected, replace(LIMITS, seconds=seconds), isolated)


def _output_failure(program: str, stdin: str, expected: str, limits: Limits, isolated: bool) -> str | None:
    outcome = sandbox.run(program, stdin, limits, isolated)
    if outcome.failure is not None:
        return outcome.failure
    if outcome.is_cut:
        return f"wrote more than {limits.output_bytes} bytes"
    # White space at the end of a line and empty lines at the end do not count.
    found, right = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (outcome.stdout, expected))
    return None if found == right else f"wrote {outcome.stdout[:80]!r}, not {expected[:80]!r}"


def _test_failure(program: str, test: str, limits: Limits, isolated: bool) -> str | None:
    passed = random.SystemRandom().randrange(64, 256)
    outcome = sandbox.run(_HARNESS.format(program=program, test=test, passed=passed), "", limits, isolated)
    if outcome.exit_code == passed:
        return None
    return outcome.failure or "ended before the test did"
