"""Starts and steps of one environment, where nothing in it can stop or slow the run.

    environments = Environments("my_tools:Search", num_workers=4, time_limit=10.0, memory_mb=4096)
    state, error = environments.reset(prompt).result()
    step, error = environments.step(state, "What is 2 + 2?").result()  # (Step(...), None)
    environments.close()

error is None, or why there is no state or step: "environment timed out after 10 s", "ZeroDivisionError: division by
zero (my_tools.py:12)".
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.environments.calls import Call, make, read
from megarl.environments.loading import BUILTIN
from megarl.environments.protocol import Step
from megarl.rewards.pool import Done, ProcessPool, Service
from megarl.types import Prompt

T = TypeVar("T")
Found = tuple[T | None, str | None]
Pending = Future[Found[T]] | Done[Found[T]]

SERVICE: Service[Found[Any]] = Service(
    "environment",
    "megarl.environments.calls:open_environment",
    lambda call, value: (read(call, value), None),
    lambda reason: (None, reason),
    "state or step",
)


class Environments:
    """Worker processes that reset and step an environment; a ready-made one is called on the spot, without any."""

    def __init__(self, name: str, num_workers: int, time_limit: float, memory_mb: int) -> None:
        """Start the workers; returns before they have imported the environment.

        Args:
            name: as `load_environment` takes it.
            time_limit: seconds a call.
            memory_mb: what a call may take beyond what importing the environment took.
        """
        self._name = name
        self._ready_made = BUILTIN[name]() if name in BUILTIN else None
        names = [] if self._ready_made is not None else [name]
        self._pool = ProcessPool(SERVICE, names, num_workers, time_limit, memory_mb)

    def reset(self, prompt: Prompt) -> Pending[dict[str, Any]]:
        """Begin an answer to a prompt: its state. Waits while the queue is full; the future never raises."""
        return self._call(("reset", (prompt.data_source, prompt.ground_truth, dict(prompt.extra_info))))

    def step(self, state: Mapping[str, Any], answer: str) -> Pending[Step]:
        """Have the environment answer to the text of a turn. Waits while the queue is full; the future never raises."""
        return self._call(("step", (dict(state), answer)))

    def close(self) -> None:
        """End all processes; calls that are not done fail."""
        self._pool.close()

    def _call(self, call: Call) -> Pending[Any]:
        if self._ready_made is None:
            return self._pool.submit(self._name, call)
        value, error = make(self._ready_made, call)
        return Done((None, error) if error is not None else (read(call, value), None))
