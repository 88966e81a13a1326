"""The processes between `sandbox.run` and the program that it runs. Run as a program, by its file's name.

    sandbox.run  ->  launcher  ->  first process (pid 1 of the namespaces)  ->  program
    sandbox.run  ->  launcher  ->  program                                      without namespaces

The launcher enters new user, mount, network, process and IPC namespaces. The first process builds what the program sees
of the file system: the interpreter and the system's libraries, read-only and without the packages that are installed
there, and an empty folder in memory. When it ends the kernel ends all that is in the namespaces. It cannot be signalled
or traced from inside.

Its argument is JSON (sandbox.py's `_specification`). Lines of JSON go back over the pipe `status`: when the program
begins {"program": its process id inside}; then {"exit": code}, of a signal its negative number, or {"error": why not}.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import shutil
import signal
import sys
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_MOUNT_SETATTR = 442
"""The system call's number on every architecture (Linux 5.12)."""
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1

USER = 1000
"""The program's user and group inside: not 0, so that exec leaves it no capabilities. The first process keeps its own:
who has fewer cannot trace it."""
FOLDER = "/sandbox"
"""The program's working folder; a name that no path of the interpreter begins with."""
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    specification = json.loads(sys.argv[1])
    status = specification["status"]
    os.set_inheritable(status, False)
    report = _Report(status)
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != specification["owner"]:
            os._exit(0)
        if specification["root"] is None:
            _prctl(_SUBREAPER, 1)  # what the program leaves behind comes here, and is found
        else:
            _enter_namespaces()
            first = os.fork()
            if first:
                os.close(status)
                os.waitpid(first, 0)
                os._exit(0)
            _prctl(_PDEATHSIG, signal.SIGKILL)
            _build_root(specification)
        report.send(exit=_run(specification, report))
        if specification["root"] is None:
            os.close(status)
            signal.pause()  # sandbox.run ends what the program has left here, then this
    except BaseException as error:
        report.send(error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


class _Report:
    def __init__(self, status: int) -> None:
        self._status = status

    def send(self, **content: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(self._status, json.dumps(content).encode() + b"\n")


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    _checked("unshare", _libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC))
    for name, content in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def _build_root(specification: dict[str, Any]) -> None:
    """What the program sees, on a file system in memory, and nothing besides. No /proc: root's files there can be
    written by whoever is root outside."""
    root = specification["root"]
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64m,mode=755")
    for folder in specification["folders"]:
        inside = root + folder
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), inside)
        elif os.path.isdir(folder):
            os.makedirs(inside, exist_ok=True)
            _mount(folder, inside, None, _MS_BIND | _MS_REC)
            _set_read_only(inside, _AT_RECURSIVE)
    for folder in specification["empty"]:
        _mount("tmpfs", root + folder, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "mode=755")
    os.mkdir(f"{root}/dev")
    for device in DEVICES:
        with open(f"{root}/dev/{device}", "w"):
            pass
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, _MS_BIND)
    shutil.copyfile(specification["program"], f"{root}/program.py")
    os.mkdir(root + FOLDER)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(FOLDER, f"{root}/tmp")
    _mount("tmpfs", root + FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={specification['files_mb']}m,mode=700")
    _set_read_only(root, 0)
    # A process below such a root may make no user namespace of its own, in which it would have capabilities again.
    os.chroot(root)
    specification |= {"program": "/program.py", "work": FOLDER}


def _run(specification: dict[str, Any], report: _Report) -> int:
    """The program's exit code, of a signal its negative number. Pid 1 collects orphans meanwhile."""
    program = os.fork()
    if program == 0:
        try:
            _become(specification)
        except BaseException as error:
            report.send(error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(70)
    for stream in (0, 1, 2):
        os.close(stream)
    report.send(program=program)
    if specification["root"] is None:
        # Not collected: its number, which is its group's, stays its own.
        found = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    while True:
        ended, status = os.wait()
        if ended == program:
            return os.waitstatus_to_exitcode(status)


def _become(specification: dict[str, Any]) -> None:
    os.setsid()  # a signal to its group reaches it alone
    _prctl(_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and what is ignored stays so after exec
        signal.signal(number, signal.SIG_DFL)
    os.chdir(specification["work"])
    _prctl(_NO_NEW_PRIVS, 1)
    for name, value in specification["resources"].items():
        _lower(getattr(resource, name), value)
    python = specification["python"]
    os.execve(python, [python, "-B", "-P", "-S", "-s", specification["program"]], specification["environment"])


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(f"mount {target}", result)


def _set_read_only(folder: str, flags: int) -> None:
    """Raises OSError (ENOSYS) before Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(_RDONLY, 0, 0, 0)  # set, clear, propagation, user namespace
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_long(_AT_FDCWD),
        folder.encode(),
        ctypes.c_ulong(flags),
        ctypes.byref(attributes),
        ctypes.c_ulong(ctypes.sizeof(attributes)),
    )
    _checked(f"making {folder} read-only (Linux {platform.release()}; 5.12 can)", result)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _checked(f"prctl {option}", _libc.prctl(option, value, 0, 0, 0))


def _checked(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {errno.errorcode.get(number, '')} {os.strerror(number)}")


if __name__ == "__main__":
    main()
