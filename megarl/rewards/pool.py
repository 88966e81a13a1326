"""Calls the user's code in processes of its own, so that nothing in it can stop or slow the run: here rewards, in
environments/pool.py the steps of environments.

    pool = RewardPool(["my_rewards:score"], num_workers=4, time_limit=10.0, memory_mb=4096)
    future = pool.submit("my_rewards:score", ("openai/gsm8k", "#### 72", "72", {}))
    future.result()  # (1.0, None), or (0.0, "reward timed out after 10 s")

A thread a worker hands calls to a keeper (keeper.py), which has the worker. A call that raises, hangs, exits, takes the
memory or the processes, or kills its parent costs itself and no other: a reward's score is then 0 with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psutil

from megarl.rewards import keeper
from megarl.rewards.keeper import BEGUN, IMPORT_LIMIT, TIMED_OUT, Settings, receive_frame, send_frame
from megarl.rewards.loading import BUILTIN, READY_MADE, TRUSTED, Call, Score, score_safely

QUEUE_PER_WORKER = 256
"""Calls that wait, a worker; with more, `submit` waits."""

GIVE_UP_AFTER = 16
"""When so many calls of a user's function in a row have lost their process, one at a time is tried and the others fail
at once, until one comes back: code that always hangs must not hold the step for its time limit an answer. Whether a
ready-made function hangs is up to the answer, so that every call of it is tried."""

GRACE = 5.0
"""Seconds over its limits after which a keeper that does not answer is taken for dead."""

_MARK = "MEGARL_REWARD_KEEPER"
"""The environment variable by which the processes of a keeper that was killed are found."""

Result = TypeVar("Result")


def is_timeout(reason: str | None) -> bool:
    """Whether a call failed because it passed its time limit."""
    subject, _, rest = (reason or "").partition(" ")
    return subject.isalpha() and rest.startswith(TIMED_OUT)


class Done(Generic[Result]):
    """A future that was done from the start: a real one takes as long as the ready-made functions."""

    __slots__ = ("_result",)

    def __init__(self, result: Result) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Result:
        return self._result


Scored = Done[Score]


class RewardPool:
    """Worker processes that score answers. Functions in TRUSTED are called on the spot; without others there is no
    process."""

    def __init__(
        self,
        functions: Iterable[str],
        num_workers: int,
        time_limit: float,
        memory_mb: int,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the workers; returns before they have imported the functions.

        Args:
            functions: names as `load_reward` takes them.
            time_limit: seconds a call (a batch is one call).
            memory_mb: what a call may take beyond what importing the functions took.
            options: of a function's name its keyword arguments (`load_reward`); of those in TRUSTED they are not used.
        """
        names = [name for name in functions if name not in TRUSTED]
        self._pool = ProcessPool(REWARDS, names, num_workers, time_limit, memory_mb, options)

    def submit(self, name: str, call: Call) -> Future[Score] | Scored:
        """Score an answer; waits while the queue is full. The future never raises.

        Raises:
            ValueError: a function that the pool was not made for.
        """
        if name in TRUSTED:
            return Scored(score_safely(BUILTIN[name], *call))
        return self._pool.submit(name, (*call[:3], dict(call[3])))

    def close(self) -> None:
        """End all processes; calls that are not done fail."""
        self._pool.close()


@dataclass(frozen=True)
class Service(Generic[Result]):
    """What a pool's workers do, and what their values become here."""

    subject: str
    opener: str
    """These two are explained at keeper.Settings."""
    read: Callable[[Any, Any], Result]
    """A call's result, from the call and the worker's value; raises where it is none, for a worker may have been
    tampered with."""
    failed: Callable[[str], Result]
    """The result of a call that failed, from the reason."""
    wanted: str
    """What a worker gives: "scores"."""


def _read_score(call: Any, value: Any) -> Score:
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a score of {score}")
    return score, None


REWARDS: Service[Score] = Service(
    "reward", "megarl.rewards.loading:open_reward", _read_score, lambda reason: (0.0, reason), "scores"
)


@dataclass(frozen=True, eq=False)
class _Pending:
    name: str
    call: Any
    future: Future[Any] = field(default_factory=Future)


class ProcessPool(Generic[Result]):
    """Worker processes that call the user's functions; none without functions."""

    def __init__(
        self,
        service: Service[Result],
        functions: Iterable[str],
        num_workers: int,
        time_limit: float,
        memory_mb: int,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the workers; returns before they have imported the functions. See `RewardPool`."""
        names = tuple(dict.fromkeys(functions))
        path = tuple(sys.path)
        self._service = service
        own = {name: dict(given) for name, given in (options or {}).items()}
        self._settings = Settings(names, time_limit, memory_mb, path, service.subject, service.opener, own)
        self._capacity = QUEUE_PER_WORKER * num_workers
        self._queue: deque[_Pending] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._batch_sizes: dict[str, int] = {}
        self._running: Counter[str] = Counter()
        self._lost_in_a_row: Counter[str] = Counter()
        self._last_loss: dict[str, str] = {}
        self._slots = [_Slot(self) for _ in range(num_workers if names else 0)]
        for slot in self._slots:
            slot.thread.start()

    def submit(self, name: str, call: Any) -> Future[Result]:
        """Make a call, which can be pickled; waits while the queue is full. The future never raises.

        Raises:
            ValueError: a function that the pool was not made for.
        """
        if name not in self._settings.functions:
            own = ", ".join(self._settings.functions)
            raise ValueError(f"the {self._service.subject} pool has no function {name!r}, it has {own}")
        pending = _Pending(name, call)
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self._capacity or self._is_closed)
            if not self._is_closed:
                self._queue.append(pending)
                self._changed.notify_all()
                return pending.future
        pending.future.set_result(self._service.failed(self.closed))
        return pending.future

    def close(self) -> None:
        """End all processes; calls that are not done fail."""
        with self._changed:
            self._is_closed = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for pending in left:
            pending.future.set_result(self._service.failed(self.closed))
        for slot in self._slots:
            slot.interrupt()
        for slot in self._slots:
            slot.thread.join(2 * GRACE)

    def take(self) -> list[_Pending]:
        """The next call, or batch of calls of one function; empty when the pool is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return []
                first = self._queue.popleft()
                lost = self._lost_in_a_row[first.name]
                is_tried = lost < GIVE_UP_AFTER or first.name in READY_MADE or not self._running[first.name]
                if is_tried:
                    size = max(1, self._batch_sizes.get(first.name, 0))
                    others = [p for p in self._queue if p.name == first.name][: size - 1] if size > 1 else []
                    for pending in others:
                        self._queue.remove(pending)
                    self._running[first.name] += 1
                else:
                    reason = f"{self._last_loss[first.name]} (not tried: so did the {lost} calls before it)"
                self._changed.notify_all()
            if is_tried:
                return [first, *others]
            first.future.set_result(self._service.failed(reason))

    def done(self, taken: list[_Pending], answer: bytes) -> None:
        """Give calls their results, from a worker's answer."""
        try:
            pairs = [(value, None if error is None else str(error)) for value, error in json.loads(answer)]
            results = [
                self._service.read(pending.call, value) if error is None else self._service.failed(error)
                for pending, (value, error) in zip(taken, pairs, strict=True)
            ]
        except Exception:  # whatever a worker wrote: the thread goes on
            self.lost(taken, f"the {self._service.subject}'s process gave no {self._service.wanted}")
            return
        with self._changed:
            self._running[taken[0].name] -= 1
            self._lost_in_a_row[taken[0].name] = 0
        for pending, result in zip(taken, results, strict=True):
            pending.future.set_result(result)

    def lost(self, taken: list[_Pending], reason: str, with_process: bool = True) -> None:
        """Have calls fail. with_process: they cost it."""
        name = taken[0].name
        with self._changed:
            self._running[name] -= 1
            self._lost_in_a_row[name] = self._lost_in_a_row[name] + 1 if with_process else 0
            if with_process:
                self._last_loss[name] = reason
        for pending in taken:
            pending.future.set_result(self._service.failed(reason))

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def closed(self) -> str:
        """Why calls of a closed pool fail."""
        return f"the {self._service.subject} pool is closed"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def learn(self, facts: bytes) -> None:
        """What a worker says of its functions."""
        self._batch_sizes = json.loads(facts)["batch_sizes"]


class _KeeperLost(Exception):
    """The keeper is gone; str() is why. has_begun: the worker had the call."""

    def __init__(self, reason: str, has_begun: bool) -> None:
        super().__init__(reason)
        self.has_begun = has_begun


class _Slot:
    """A thread, its keeper, and the calls that it hands over, one after another."""

    def __init__(self, pool: ProcessPool[Any]) -> None:
        self.pool = pool
        self.thread = threading.Thread(target=self._run, name=pool.settings.subject, daemon=True)
        self._keeper: _Keeper | None = None

    def interrupt(self) -> None:
        """End the wait for a call; the pool is closed."""
        if self._keeper is not None:
            self._keeper.hang_up()

    def _run(self) -> None:
        # The keeper is a child of this thread, which lives as long as the pool.
        try:
            self._ask(b"")
            while taken := self.pool.take():
                try:
                    content = pickle.dumps((taken[0].name, [pending.call for pending in taken]))
                except Exception as error:
                    process = f"the {self.pool.settings.subject}'s process"
                    reason = f"extra_info cannot be sent to {process}: {type(error).__name__}: {error}"
                    self.pool.lost(taken, reason, with_process=False)
                    continue
                found = self._ask(content)
                if isinstance(found, bytes):
                    self.pool.done(taken, found)
                else:
                    self.pool.lost(taken, found)
        finally:
            if self._keeper is not None:
                self._keeper.end()

    def _ask(self, request: bytes) -> bytes | str:
        """A worker's answer as JSON, or why there is none. Starts the keeper, and again when it is lost before the
        worker had the call."""
        reason = ""
        for _ in range(3):
            if self.pool.is_closed:
                return self.pool.closed
            try:
                if self._keeper is None:
                    self._keeper = _Keeper(self.pool.settings)
                    if self.pool.is_closed:  # since the question above: `interrupt` may have seen no keeper
                        self._keeper.hang_up()
                return self._keeper.ask(request, self.pool)
            except _KeeperLost as error:
                reason = self.pool.closed if self.pool.is_closed else str(error)
                if self._keeper is not None:
                    self._keeper.end()
                    self._keeper = None
                if error.has_begun:
                    break
            except Exception as error:  # no process to be had for a keeper; whatever it is, the thread goes on
                subject = self.pool.settings.subject
                reason = f"the {subject}'s process cannot be had: {type(error).__name__}: {error}"
                time.sleep(1.0)
        return reason


class _Keeper:
    """The owner's side of one keeper process."""

    def __init__(self, settings: Settings) -> None:
        self._connection, theirs = socket.socketpair()
        self._time_limit, self._parent = settings.time_limit, f"the parent of the {settings.subject}'s process"
        self._mark = uuid.uuid4().hex
        arguments = [sys.executable, "-P", keeper.__file__, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, _MARK: self._mark},
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # gone already: the first call finds out
            send_frame(self._connection, pickle.dumps(dataclasses.asdict(settings)))

    def ask(self, request: bytes, pool: ProcessPool[Any]) -> bytes | str:
        """A worker's answer as JSON, or why there is none; of an empty request, nothing."""
        has_begun = False
        try:
            self._connection.settimeout(GRACE)
            send_frame(self._connection, request)
            answer = self._receive(IMPORT_LIMIT + GRACE)
            if answer[:1] == BEGUN:
                has_begun = True
                pool.learn(answer[1:])
                if not request:
                    return b""
                answer = self._receive(self._time_limit + GRACE)
            return answer[1:] if answer[:1] == keeper.RESULT else answer[1:].decode(errors="replace")
        except TimeoutError:
            raise _KeeperLost(f"{self._parent} was stopped", has_begun) from None
        except (OSError, EOFError):
            raise _KeeperLost(self._death(), has_begun) from None

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End the keeper and everything that it or its worker started."""
        self.hang_up()
        self._connection.close()
        try:
            is_clean = self._process.wait(GRACE) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            is_clean = False
        if not is_clean:
            self._sweep()

    def _sweep(self) -> None:
        """Kill what a keeper left that could not clean up: its workers' children have its mark in their environment."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            left = [process for process in psutil.process_iter() if self._owns(process)]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 0.1)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark)
        except (psutil.Error, OSError):
            return False

    def _receive(self, limit: float) -> bytes:
        answer = receive_frame(self._connection, time.monotonic() + limit)
        if answer is None:
            raise EOFError
        return answer

    def _death(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{self._parent} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self._parent} {how}"
