"""The process between a trainer's or rollout's process and one worker that runs the user's code: rewards, or an
environment's steps. Run as a program by pool.py.

    owner (rollout, trainer)  --socket-->  keeper  --socket-->  worker (the user's code)

The keeper is small and runs no user code. It forks the worker, hands it one call at a time, kills it with everything it
started when a call takes too long, too many processes or too much memory, and forks the next one. It is what a call
that kills its parent hits; the owner then starts another. When the owner goes, the socket ends and the keeper takes
everything with it.

Frames are a length and that many bytes. From the owner: first the settings, then one frame a call; an empty one asks
for what the worker's functions are. To the owner: BEGUN with these facts when the worker has imported its functions and
has the call, then RESULT with the values as JSON or FAILED with the reason. Nothing that a worker wrote is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import psutil

BEGUN, RESULT, FAILED, SPENT = b"B", b"R", b"F", b"S"
"""SPENT, from a worker: its result, after which it wants to be replaced."""

TIMED_OUT = "timed out after"
"""What follows the subject in the reason of a call that passed its time limit."""

IMPORT_LIMIT = 120.0
"""Seconds for a worker to import its functions."""

MAX_PROCESSES = 64
"""Processes that a worker may have started and left."""

MAX_FRAME = 1 << 30
OUTPUT_KEPT = 1024
"""Bytes of what a call prints that are kept; the reason gives their beginning when the process is lost."""

_TICK = 0.1
"""Least seconds between two looks at a worker's processes."""
_LOOK_SHARE = 0.05
"""Looking takes at most this share of the time: it reads every process of the host."""
_SETTLED = 1.0
"""Seconds after a call when its processes are looked at once more."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Settings:
    functions: tuple[str, ...]
    time_limit: float
    """Seconds a call."""
    memory_mb: int
    """What a call may take beyond what importing the functions took."""
    python_path: tuple[str, ...]
    subject: str
    """What reasons call the user's code, and its section of the configuration: "reward"."""
    opener: str
    """"module:function" of megarl, for the worker: gives of a function's name (a callable that answers a list of calls
    with as many pairs of a value, which JSON can hold, and an error or None; the batch size, 0 for one call at a time),
    and raises ValueError when the function cannot be loaded."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of a function's name the keyword arguments that the opener gets besides it."""


def send_frame(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(4, "big") + content)


def receive_frame(connection: socket.socket, end: float | None = None) -> bytes | None:
    """The next frame; None when the other side is gone. Raises TimeoutError after `end` (time.monotonic())."""
    header = _receive(connection, 4, end)
    length = int.from_bytes(header, "big") if header is not None else 0
    return None if header is None or length > MAX_FRAME else _receive(connection, length, end)


def _receive(connection: socket.socket, length: int, end: float | None) -> bytes | None:
    content = bytearray()
    while len(content) < length:
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        try:
            more = connection.recv(min(length - len(content), 1 << 20))
        except ConnectionError:
            return None
        if not more:
            return None
        content += more
    return bytes(content)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux; elsewhere the end of the socket must
    do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # gone before the kernel was told
        os._exit(0)


class OwnerGone(Exception):
    """The owner's side of the socket has ended."""


class Worker:
    """The keeper's view of one worker process: fork it, wait for it, end it."""

    def __init__(self, owner: socket.socket, settings: Settings) -> None:
        self._settings, self.facts = settings, b""
        """facts: what the worker says of its functions once they are imported."""
        self._connection, theirs = socket.socketpair()
        self._output, printed = os.pipe()
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            owner.close()
            self._connection.close()
            os.close(self._output)
            _worker_process(keeper, theirs, printed, settings)
        theirs.close()
        os.close(printed)
        os.set_blocking(self._output, False)
        self._status: int | None = None
        self._printed = b""
        self._poll = select.poll()
        self._poll.register(owner, 0)  # 0: only that it has ended
        self._poll.register(self._connection, select.POLLIN)
        self._poll.register(self._output, select.POLLIN)
        self._owner = owner.fileno()
        self._memory_limit: int | None = None
        self._next_look = 0.0

    def import_functions(self) -> str | None:
        """Wait until the functions are imported; None, or why they are not."""
        if self.facts:
            return None
        subject = self._settings.subject
        found = self._next_frame(IMPORT_LIMIT, f"importing the {subject} took longer than {IMPORT_LIMIT:g} s")
        if isinstance(found, str):
            return f"importing the {subject}: {found}" if not found.startswith("importing") else found
        self.facts = found
        self._memory_limit = json.loads(found)["memory_limit"]
        return None

    def call(self, request: bytes) -> bytes | str:
        """The worker's answer to a request, or why there is none."""
        self._read_output()
        self._printed = b""
        try:
            send_frame(self._connection, request)
        except OSError:
            return self._death()
        limit = self._settings.time_limit
        return self._next_frame(limit, f"{self._settings.subject} {TIMED_OUT} {limit:g} s")

    def has_ended(self) -> bool:
        """Between two calls: whether the worker went after it had imported its functions."""
        return bool(self.facts and select.select([self._connection], [], [], 0)[0])

    def end(self) -> None:
        """Kill the worker and everything that it started, and wait until it is gone."""
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)  # the whole group at once: no fork outruns it
            # Orphans come to the keeper, which is their subreaper.
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if self._reap():
                break
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            self._connection.close()
            os.close(self._output)

    def with_output(self, reason: str) -> str:
        """The reason, and what the call printed."""
        self._read_output()
        printed = " ".join(self._printed.decode(errors="replace").split())
        return f"{reason}; it printed: {printed[:200]}" if printed else reason

    def _next_frame(self, limit: float, late: str) -> bytes | str:
        end = time.monotonic() + limit
        self._next_look = max(self._next_look, time.monotonic() + _TICK)
        while (now := time.monotonic()) < end:
            for descriptor, _ in self._poll.poll(1e3 * min(_TICK, end - now)):
                if descriptor == self._owner:
                    raise OwnerGone
                if descriptor == self._output:
                    self._read_output()
                else:
                    try:
                        frame = receive_frame(self._connection, end)
                    except TimeoutError:
                        return late
                    return self._death() if frame is None else frame
            if now > self._next_look:
                self._reap()
                reason = self._death() if self._status is not None else self.excess()
                if reason:
                    return reason
        return late

    def _read_output(self) -> None:
        try:
            content = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not content:  # closed: it stays readable and must not keep the poll awake
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._output)
        self._printed += content[: OUTPUT_KEPT - len(self._printed)]

    def _reap(self) -> bool:
        """Collect what has ended; True when no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return False
                if pid == self.pid:
                    self._status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return True

    def _death(self) -> str:
        end = time.monotonic() + 1.0
        while self._status is None and time.monotonic() < end:
            self._reap()
            time.sleep(0.002)
        subject = self._settings.subject
        if self._status is None:
            return f"the {subject} closed the connection of its process"
        if self._status < 0:
            return f"the {subject}'s process was killed by {signal.Signals(-self._status).name}"
        return f"the {subject}'s process ended with exit code {self._status}"

    def excess(self) -> str | None:
        """What the worker's processes are too many of, if they are."""
        start = time.monotonic()
        found = self._excess()
        now = time.monotonic()
        self._next_look = now + max(_TICK, (now - start) / _LOOK_SHARE)
        return found

    def _excess(self) -> str | None:
        subject = self._settings.subject
        processes = psutil.Process().children(recursive=True)
        if len(processes) > MAX_PROCESSES + 1:
            return f"the {subject} had more than {MAX_PROCESSES} processes"
        if self._memory_limit is not None and len(processes) > 1:  # the kernel limits each one alone
            taken = 0
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    taken += process.memory_info().rss
            if taken > self._memory_limit:
                most = self._settings.memory_mb
                return f"the {subject}'s processes took more than {most} MB ({subject}.memory_mb)"
        return None


def keep(owner: socket.socket, settings: Settings) -> None:
    """Serve the owner's calls until it goes."""
    worker: Worker | None = Worker(owner, settings)
    try:
        while True:
            if not select.select([owner], [], [], _SETTLED)[0] and worker is not None and worker.excess():
                worker.end()
                worker = None
            request = receive_frame(owner)
            if request is None:
                return
            if worker is not None and worker.has_ended():
                worker.end()
                worker = None
            if worker is None:
                worker = Worker(owner, settings)
            found: bytes | str | None = worker.import_functions()
            if found is None:
                send_frame(owner, BEGUN + worker.facts)
                if not request:
                    continue
                found = worker.call(request)
            if isinstance(found, bytes) and found[:1] == RESULT:
                send_frame(owner, found)
                continue
            reason = worker.with_output(found) if isinstance(found, str) else ""
            worker.end()
            worker = None
            if isinstance(found, str):
                send_frame(owner, FAILED + reason.encode(errors="replace"))
            else:
                send_frame(owner, RESULT + found[1:])
            worker = Worker(owner, settings)  # its imports go on while the owner is busy
    except (OwnerGone, ConnectionError):
        return
    finally:
        if worker is not None:
            worker.end()


# ---------------------------------------------------------------------------------------------- in the worker


def _worker_process(keeper: int, connection: socket.socket, printed: int, settings: Settings) -> None:
    """Everything that the worker's process does; does not return."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(keeper, signal.SIGKILL)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
        _set_limits()
        _work(connection, settings)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _set_limits() -> None:
    os.nice(5)
    with contextlib.suppress(OSError):  # when memory runs out on the host, this goes before the run does
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    _lower(resource.RLIMIT_CORE, 0)
    # The kernel counts all of the user's threads, also the run's own, which come and go: far above them, so that only a
    # fork bomb meets it.
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as file:
        threads = int(file.read().split()[3].split("/")[1])
        _lower(resource.RLIMIT_NPROC, 2 * threads + 4096)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))


def _work(connection: socket.socket, settings: Settings) -> None:
    own = os.getpid()
    sys.path[:] = settings.python_path
    module, _, attribute = settings.opener.partition(":")
    opener = getattr(importlib.import_module(module), attribute)

    functions: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name in settings.functions:
        try:
            functions[name], sizes[name] = opener(name, **settings.options.get(name, {}))
        except ValueError as error:
            functions[name] = str(error)
    memory_limit = psutil.Process().memory_info().vms + settings.memory_mb * 2**20
    _lower(resource.RLIMIT_AS, memory_limit)
    send_frame(connection, json.dumps({"batch_sizes": sizes, "memory_limit": memory_limit}).encode())
    while (request := receive_frame(connection)) is not None:
        name, calls = pickle.loads(request)
        function = functions[name]
        if isinstance(function, str):
            found: list[tuple[Any, str | None]] = [(None, function)] * len(calls)
        else:
            try:
                found = function(calls)
            except BaseException as error:  # sys.exit and the like
                found = [(None, f"{type(error).__name__}: {str(error)[:300]}")] * len(calls)
        if os.getpid() != own:  # a child that the call forked and that came back from it
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        is_spent = any(error is not None and error.startswith("MemoryError") for _, error in found)
        if is_spent:
            found = [(v, e and f"{e} ({settings.subject}.memory_mb is {settings.memory_mb})") for v, e in found]
        send_frame(connection, (SPENT if is_spent else RESULT) + json.dumps(found).encode())


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Arguments: the socket's file descriptor and the owner's process id."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    owner.setblocking(True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel may send it twice, for the owner's thread and for the owner: nothing is raised amid the cleaning up.
    signal.signal(signal.SIGTERM, lambda *_: _hang_up(owner))
    end_with_parent(int(sys.argv[2]), signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = receive_frame(owner)
    if settings is not None:
        keep(owner, Settings(**pickle.loads(settings)))


if __name__ == "__main__":
    main()
