"""Processes that are called one call at a time, and what makes them fail."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

DEADLINE = 60.0
"""Seconds that a test waits for an answer."""


class Party:
    """A process that answers calls to the object that `make` gives. A forked one starts at once."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, start: str = "fork") -> None:
        context = multiprocessing.get_context(start)
        self._here, there = context.Pipe()
        inherited = self._here if start == "fork" else None
        self.process = context.Process(target=_serve, args=(there, inherited, make, arguments), daemon=True)
        self.process.start()
        there.close()

    def start(self, method: str, *values: Any) -> None:
        self._here.send((method, values))

    def result(self) -> Any:
        """What the call that was started gives: its value, a RuntimeError with what it raised, or "dead" if the
        process is no more."""
        assert self._here.poll(DEADLINE), "no answer"
        try:
            is_good, value = self._here.recv()
        except EOFError:
            return "dead"
        return value if is_good else RuntimeError(value)

    def call(self, method: str, *values: Any) -> Any:
        self.start(method, *values)
        return self.result()


def _serve(pipe: Any, inherited: Any, make: Callable[..., Any], arguments: Any) -> None:
    if inherited is not None:
        inherited.close()
    served = make(*arguments)
    while True:
        method, values = pipe.recv()
        try:
            pipe.send((True, getattr(served, method)(*values)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


@contextlib.contextmanager
def parties(*made: Party) -> Iterator[None]:
    """They are gone afterwards."""
    try:
        yield
    finally:
        for party in made:
            party.process.kill()
            party.process.join()


def inject(owner: type, name: str, first: Any, what: str) -> None:
    """In this process: after the first call of a method with `first` as its first argument, `what` happens: die, hang,
    fail, or corrupt (its third argument are buffers by name)."""
    real, seen = getattr(owner, name), set()

    def broken(self: Any, at: Any, *arguments: Any) -> None:
        real(self, at, *arguments)
        if at == first and at not in seen:
            seen.add(at)
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hang":
                time.sleep(3600)
            elif what == "fail":
                raise ZeroDivisionError("it broke")
            else:
                assert what == "corrupt"
                next(iter(arguments[1].values()))[1] ^= 4  # a bit of the first element's mantissa

    setattr(owner, name, broken)
