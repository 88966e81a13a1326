"""Runs a Python program that a model wrote where it can do no harm.

    run("print(int(input()) + 1)", "41").stdout  # "42\n"

The program has the standard library, an empty folder that is gone afterwards, and limits. Where the kernel has user
namespaces for it, it is also isolated: it sees the interpreter and the system's libraries read-only and no other file,
no network, no other process and an empty environment. `isolation_problem` says why they are not to be had; without
them a program gets the limits alone, and can read, write, connect to and kill what its user can.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from typing import Any

import psutil

from megarl.rewards import sandbox_init

SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32")
"""What an isolated program sees besides the interpreter's own folder."""
_PACKAGES = ("site-packages", "dist-packages")
"""Where below lib/python3.11 and the like installed packages are, which it does not see."""

_MARK = "MEGARL_SANDBOX"
"""The environment variable by which the processes of a program that is not isolated are found."""
_PREFIX = "megarl-sandbox-"
_STALE = 3600.0
"""Seconds after which a program's folder is one of a process that was killed."""
_FIRST_LOOK = 0.05
_LOOK_SHARE = 0.05
"""Looking at the program's processes takes at most this share of the time: it reads every process of the host."""
_ERRORS_KEPT = 4096
"""Bytes of stderr that are kept, the last."""
_START_LIMIT = 30.0
"""Seconds for the sandbox to be made; 0.03 where the machine is not busy."""
_END_LIMIT = 5.0
"""Seconds to wait for processes that were killed."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 4.0
    """By the clock, from when the program begins; and of processor time, each process."""
    memory_mb: int = 1024
    """Address space of a process, and what all of them hold together."""
    processes: int = 16
    """More than these, threads not counted, end the program."""
    output_bytes: int = 1 << 20
    """The first of stdout that are kept."""
    files_mb: int = 64
    """Size of a file; isolated, of all of them together."""


@dataclass(frozen=True)
class Outcome:
    exit_code: int | None
    """Of a signal its negative number; None: the program was ended, and `reason` says why."""
    stdout: str
    is_cut: bool
    """Whether the program wrote more than `output_bytes`."""
    stderr: str
    """Its end."""
    reason: str | None = None
    """The limit that the program met: "ran longer than 4 s"."""

    @property
    def failure(self) -> str | None:
        """Why the program did not end with exit code 0, in a line; None: it did."""
        if self.reason is not None or self.exit_code == 0:
            return self.reason
        code = self.exit_code or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.stderr.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last[:200]}" if last else how


class SandboxError(RuntimeError):
    """There is no process to be had for a program."""


@functools.cache
def isolation_problem() -> str | None:
    """Why programs cannot be isolated on this machine, or None: they can. Tried once, with a program."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, this is {sys.platform}"
    try:
        return run("", limits=Limits(seconds=30.0)).failure
    except SandboxError as error:
        return str(error)


def run(program: str, stdin: str = "", limits: Limits = Limits(), isolated: bool = True) -> Outcome:
    """Run a program to its end or to a limit. No process and no file of it is left afterwards.

    Raises SandboxError when the program cannot be started: isolated, when `isolation_problem` says why.
    """
    _remove_stale()
    folder = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        for name, content in (("program.py", program), ("stdin", stdin)):
            with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace", newline="") as file:
                file.write(content)
        os.mkdir(os.path.join(folder, "work"))
        return _Run(folder, limits, isolated).outcome()
    finally:
        _remove(folder)


def _specification(folder: str, limits: Limits, isolated: bool, status: int, mark: str) -> dict[str, Any]:
    """The launcher's argument."""
    threads = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as file:
        threads = int(file.read().split()[3].split("/")[1])
    resources = {
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.files_mb * 2**20,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 256,
        # The kernel may count all of the user's threads, also the run's own: far above these. It bounds a fork bomb
        # until `processes` ends it.
        "RLIMIT_NPROC": threads + 1024,
    }
    work = os.path.join(folder, "work")
    home = sandbox_init.FOLDER if isolated else work
    prefix = os.path.realpath(sys.base_prefix)
    folders = (*SYSTEM_FOLDERS, *([] if f"{prefix}/".startswith("/usr/") else [prefix]))
    return {
        "root": work if isolated else None,
        "program": os.path.join(folder, "program.py"),
        "work": work,
        "folders": folders,
        "empty": _packages(*folders),
        "files_mb": limits.files_mb,
        "resources": resources,
        "python": os.path.realpath(sys.executable),
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the same program, the same score
            "OMP_NUM_THREADS": "1",
            _MARK: mark,
            **_library_path(),
        },
        "status": status,
        "owner": os.getpid(),
    }


@functools.cache
def _packages(*folders: str) -> list[str]:
    """The folders of installed packages in what an isolated program sees, by their real paths."""
    prefixes = {*folders, "/usr/local", os.path.realpath(sys.base_prefix)}
    found = {
        os.path.realpath(path)
        for prefix in prefixes
        for pattern in ("lib*/python*", "python*")  # of /usr, and of /lib64
        for name in _PACKAGES
        for path in glob.glob(os.path.join(glob.escape(prefix), pattern, name))
    }
    seen = tuple(f"{folder}/" for folder in folders if not os.path.islink(folder))
    return sorted(path for path in found if os.path.isdir(path) and path.startswith(seen))


def _library_path() -> dict[str, str]:
    """What some interpreters need to start."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}


class _Run:
    """One program: its launcher, what it writes, its end."""

    def __init__(self, folder: str, limits: Limits, isolated: bool) -> None:
        self._limits, self._isolated, self._mark = limits, isolated, uuid.uuid4().hex
        status, theirs = os.pipe()
        specification = _specification(folder, limits, isolated, theirs, self._mark)
        try:
            with open(os.path.join(folder, "stdin"), "rb") as stdin:
                self._launcher = subprocess.Popen(
                    [specification["python"], "-I", "-S", sandbox_init.__file__, json.dumps(specification)],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs,),
                    start_new_session=True,
                    cwd="/",
                    env={_MARK: self._mark, **_library_path()},
                )
        except OSError as error:
            os.close(status)
            raise SandboxError(f"no process for a program: {error}") from error
        finally:
            os.close(theirs)
        assert self._launcher.stdout is not None
        assert self._launcher.stderr is not None
        self._status, self._stdout, self._stderr = (
            status,
            self._launcher.stdout.fileno(),
            self._launcher.stderr.fileno(),
        )
        self._written = {self._status: bytearray(), self._stdout: bytearray(), self._stderr: bytearray()}
        self._is_cut = False

    def outcome(self) -> Outcome:
        try:
            reason = self._wait()
            self._kill()
            self._read_rest()
        finally:
            self._kill()  # also when the wait is interrupted
            self._close()
        found = self._reported()
        if "error" in found:
            raise SandboxError(str(found["error"]))
        if not found:
            said = self._written[self._stderr].decode(errors="replace").strip()
            raise SandboxError(f"the launcher ended before the program began: {said[-200:]}")
        if reason is None and "exit" not in found:
            reason = "ended the process that had started it"
        return Outcome(
            None if reason else int(found["exit"]),
            self._written[self._stdout].decode(errors="replace"),
            self._is_cut,
            self._written[self._stderr].decode(errors="replace"),
            reason,
        )

    def _reported(self) -> dict[str, Any]:
        """What the launcher has said so far."""
        found: dict[str, Any] = {}
        for line in bytes(self._written[self._status]).split(b"\n")[:-1]:
            found |= json.loads(line)
        return found

    def _wait(self) -> str | None:
        """Until the program has ended, or the limit that it met."""
        poll = select.poll()
        for descriptor in self._written:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)
        begun, end = False, time.monotonic() + _START_LIMIT
        next_look = time.monotonic() + _FIRST_LOOK
        while True:
            now = time.monotonic()
            if not begun and self._reported():
                begun, end = True, now + self._limits.seconds
            if now >= end:
                if not begun:
                    raise SandboxError(f"there was no sandbox after {_START_LIMIT:g} s")
                return f"ran longer than {self._limits.seconds:g} s"
            if now >= next_look:
                if excess := self._excess():
                    return excess
                next_look = time.monotonic() + max(_FIRST_LOOK, (time.monotonic() - now) / _LOOK_SHARE)
            for descriptor, _ in poll.poll(1e3 * max(0.0, min(next_look, end) - time.monotonic())):
                if not self._read(descriptor):
                    if descriptor == self._status:
                        return None
                    poll.unregister(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Take what is there; False when there is no more and will be none."""
        try:
            content = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        kept = self._written[descriptor]
        kept += content
        if descriptor == self._stderr:
            del kept[:-_ERRORS_KEPT]
        elif descriptor == self._stdout and len(kept) > self._limits.output_bytes:
            del kept[self._limits.output_bytes :]
            self._is_cut = True
        return bool(content)

    def _read_rest(self) -> None:
        """What the pipes still hold; whoever could write more is dead."""
        for descriptor in self._written:
            while select.select([descriptor], [], [], 0)[0] and self._read(descriptor):
                pass

    def _excess(self) -> str | None:
        found = self._descendants()
        if len(found) > self._limits.processes + self._isolated:
            return f"had more than {self._limits.processes} processes"
        taken = 0
        for process in found:
            with contextlib.suppress(psutil.Error):
                taken += process.memory_info().rss
        return f"took more than {self._limits.memory_mb} MB" if taken > self._limits.memory_mb * 2**20 else None

    def _descendants(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self._launcher.pid).children(recursive=True)
        return found

    def _kill(self) -> None:
        """End the program and everything that it started, and wait until it is gone."""
        if self._launcher.returncode is not None:
            return
        if self._isolated:
            self._kill_first_process()
        else:
            self._kill_all()
        self._launcher.kill()
        self._launcher.wait()

    def _kill_first_process(self) -> None:
        """The kernel ends everything else in the namespaces before the launcher sees it end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if "exit" in self._reported():  # it is about to
                self._launcher.wait(_END_LIMIT)
        if self._launcher.poll() is not None:
            return
        self._launcher.send_signal(signal.SIGSTOP)  # it starts nothing more
        processes = self._descendants()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if processes:
            self._launcher.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_END_LIMIT)

    def _kill_all(self) -> None:
        """Its processes are below the launcher, or have the mark in their environment."""
        program = self._reported().get("program")
        end = time.monotonic() + _END_LIMIT
        while time.monotonic() < end:
            if program is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(program, signal.SIGKILL)  # the whole group at once: no fork outruns it
            below = {process.pid for process in self._descendants()}
            left = [process for process in psutil.process_iter() if self._is_left(process, below)]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.001)

    def _is_left(self, process: psutil.Process, below: set[int]) -> bool:
        try:
            if process.pid == self._launcher.pid or process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.pid in below or process.environ().get(_MARK) == self._mark
        except (psutil.Error, OSError):
            return False

    def _close(self) -> None:
        os.close(self._status)
        for stream in (self._launcher.stdout, self._launcher.stderr):
            if stream is not None:
                stream.close()


@functools.cache
def _remove_stale() -> None:
    """Once a process: what others have left that were killed amid a program, as the reward pool does."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            is_own = entry.is_dir(follow_symlinks=False) and found.st_uid == os.geteuid()
            if is_own and time.time() - found.st_mtime > _STALE:
                _remove(entry.path)


def _remove(folder: str) -> None:
    """Also what the program has made unreadable. Links are removed, and what they lead to is not touched."""
    for path, folders, _ in os.walk(folder):
        for inside in (os.path.join(path, name) for name in folders):
            if not os.path.islink(inside):  # chmod would follow it: Linux changes no link's own mode
                with contextlib.suppress(OSError):
                    os.chmod(inside, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
