"""Remote calls with a deadline, whose errors name the rank, the host and the stage, and show the first real
exception."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "remote process exit",
)
"""What gloo and NCCL say on the ranks that are left when another one goes."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; the text says which one, on which host, in which stage, and
    why."""


@dataclass(frozen=True)
class Callee:
    """Whom a call goes to, for errors: Callee("actor and critic rank 3", "node7")."""

    name: str
    host: str


def gather(refs: Sequence[Any], callees: Sequence[Callee], stage: str, deadline: float) -> list[Any]:
    """The results of one call to each of several workers, in their order.

    The first failure ends the wait: the other ranks may be stuck in a collective that will never complete.

    Raises:
        WorkerError: a worker raised, died, or the deadline (seconds) passed.
    """
    pending = {ref: index for index, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    end = time.monotonic() + deadline
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(end - time.monotonic(), 0))
        if not done:
            waiting = ", ".join(f"{callees[i].name} on {callees[i].host}" for i in sorted(pending.values())[:8])
            raise WorkerError(
                f"{stage}: no answer within {deadline:g} s from {waiting} (run.deadline, at start run.startup_deadline)"
            )
        index = pending.pop(done[0])
        try:
            results[index] = ray.get(done[0])
        except RayError as error:
            failures = [(callees[index], error), *_other_failures(pending, callees)]
            callee, cause = min(failures, key=lambda f: _is_consequence(f[1]))
            raise WorkerError(f"{stage}: {callee.name} on {callee.host} failed: {_reason(cause)}") from cause
    return results


def _other_failures(pending: dict[Any, int], callees: Sequence[Callee]) -> list[tuple[Callee, Exception]]:
    """What else fails within a moment: one rank's death shows on others as a broken connection, often sooner."""
    failures: list[tuple[Callee, Exception]] = []
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=1.0) if pending else ([], [])
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            failures.append((callees[pending[ref]], error))
    return failures


def _is_consequence(error: Exception) -> bool:
    """Whether the error looks like the echo of another rank's failure."""
    text = str(error)
    return any(word in text for word in ECHOES)


def _reason(error: Exception) -> str:
    text = _COLOUR.sub("", str(error)).strip()
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}\n" + "\n".join(text.splitlines()[-25:])
    if isinstance(error, RayActorError):
        return f"the process died ({type(error).__name__}): {text}"
    return f"{type(error).__name__}: {text}"
