"""Programs that mean harm: each is contained and reported, and leaves nothing behind.

What limits alone contain is tried with and without namespaces. What only namespaces contain is tried where the machine
has them; where it has not, that is said with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import psutil
import pytest

from megarl.rewards import sandbox, sandbox_init
from megarl.rewards.sandbox import Limits, Outcome, SandboxError, isolation_problem, run

PROBLEM = isolation_problem()
BOTH = [False] if PROBLEM else [False, True]


def left_behind() -> list[int]:
    """Processes of programs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and sandbox._MARK in process.environ():
                found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the sandbox makes its folders; afterwards there is none, and no process."""
    monkeypatch.setattr(sandbox, "_MARK", f"MEGARL_SANDBOX_{os.getpid()}")  # not those of another run of the tests
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    yield made
    assert list(made.iterdir()) == []
    assert left_behind() == []


@pytest.fixture(params=BOTH, ids=lambda isolated: "isolated" if isolated else "limits")
def isolated(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


def with_isolation(test: Callable[..., None]) -> Callable[..., None]:
    """Where there is none, the test is that the reason is given."""

    @wraps(test)
    def wrapped(*arguments: object, **named: object) -> None:
        if PROBLEM is None:
            test(*arguments, **named)
        else:
            assert len(PROBLEM) > 5
            with pytest.raises(SandboxError):
                run("")

    return wrapped


# ------------------------------------------------------------------------------------------------ ordinary programs


def test_a_program_reads_and_writes(isolated: bool) -> None:
    program = "import sys\na, b = map(int, input().split())\nprint(a + b)\nprint('note', file=sys.stderr)"
    assert run(program, "2 40\n", isolated=isolated) == Outcome(0, "42\n", False, "note\n")


def test_it_has_the_standard_library_and_a_folder_of_its_own(isolated: bool) -> None:
    program = (
        "import collections, decimal, heapq, itertools, json, math, os, re, sqlite3, tempfile\n"
        "assert os.listdir('.') == [] and os.environ['HOME'] == os.getcwd()\n"
        "with open('a', 'w') as file: file.write('text')\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "print(open('a').read(), math.comb(5, 2))"
    )
    assert run(program, isolated=isolated).stdout == "text 10\n"


def test_nothing_of_the_environment_and_no_installed_package_is_there(
    isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "42")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    program = "import os\nprint('A_SECRET' in os.environ, 'PYTHONPATH' in os.environ)\nimport megarl"
    found = run(program, isolated=isolated)
    assert found.stdout == "False False\n"
    assert found.failure == "ended with exit code 1: ModuleNotFoundError: No module named 'megarl'"


def test_the_same_program_gives_the_same_output(isolated: bool) -> None:
    found = [run("print(set('abcdefgh'))", isolated=isolated).stdout for _ in range(3)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("program", "code", "failure"),
    [
        ("", 0, None),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3"),
        ("1 / 0", 1, "ended with exit code 1: ZeroDivisionError: division by zero"),
        ("def f(:", 1, "ended with exit code 1: SyntaxError: invalid syntax"),
        ("x = '\ud800'", 0, None),
        ("\0", 1, "ended with exit code 1: "),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL"),
        ("import os; os.kill(0, 15); input()", -15, "was killed by SIGTERM"),
        ("import os; os.abort()", -6, "was killed by SIGABRT"),
        ("input()", 1, "ended with exit code 1: EOFError: EOF when reading a line"),
    ],
)
def test_every_end_has_its_reason(isolated: bool, program: str, code: int, failure: str | None) -> None:
    found = run(program, isolated=isolated)
    assert found.exit_code == code
    assert found.failure is None if failure is None else str(found.failure).startswith(failure)


# ------------------------------------------------------------------------------------------------ limits


def test_an_infinite_loop_ends_at_the_time_limit(isolated: bool) -> None:
    found = run("print('begun', flush=True)\nwhile True: pass", limits=Limits(seconds=1.0), isolated=isolated)
    assert (found.exit_code, found.stdout, found.failure) == (None, "begun\n", "ran longer than 1 s")


def test_a_program_that_closes_everything_and_ignores_signals_ends_too(isolated: bool) -> None:
    program = (
        "import os, signal, time\n"
        "for n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "os.closerange(0, 256)\ntime.sleep(60)"
    )
    assert run(program, limits=Limits(seconds=0.5), isolated=isolated).failure == "ran longer than 0.5 s"


def test_ten_gigabytes_are_refused(isolated: bool) -> None:
    found = run("x = bytearray(10 << 30)", isolated=isolated)
    assert found.failure == "ended with exit code 1: MemoryError"
    assert run("x = bytearray(100 << 20)", isolated=isolated).failure is None


def test_memory_of_many_processes_is_counted_together(isolated: bool) -> None:
    program = (
        "import os, time\nfor _ in range(6):\n"
        "    if os.fork() == 0:\n        x = b'x' * (60 << 20)\n        time.sleep(60)\ntime.sleep(60)"
    )
    limits = Limits(seconds=20, memory_mb=200)
    assert run(program, limits=limits, isolated=isolated).failure == "took more than 200 MB"


def test_a_fork_bomb_is_ended(isolated: bool) -> None:
    """Every process forks again, up to 2 to the power of 8."""
    program = "import os, time\nfor _ in range(8): os.fork()\ntime.sleep(60)"
    assert run(program, limits=Limits(seconds=20), isolated=isolated).failure == "had more than 16 processes"


def test_sixteen_processes_are_allowed(isolated: bool) -> None:
    program = (
        "import os, time\npids = []\nfor _ in range(15):\n    pids.append(os.fork())\n"
        "    if pids[-1] == 0:\n        time.sleep(0.3)\n        os._exit(0)\n"
        "for pid in pids: os.waitpid(pid, 0)"
    )
    assert run(program, limits=Limits(seconds=20), isolated=isolated).failure is None


def test_megabytes_of_output_are_cut(isolated: bool) -> None:
    program = "import sys\nprint('x' * 10_000_000)\nsys.stderr.write('y' * 10_000_000 + '\\nlast')\nsys.exit(2)"
    found = run(program, limits=Limits(output_bytes=1000), isolated=isolated)
    assert (found.stdout, found.is_cut, found.exit_code) == ("x" * 1000, True, 2)
    assert len(found.stderr) <= 4096
    assert found.failure == "ended with exit code 2: last"


def test_output_as_long_as_the_limit_is_whole(isolated: bool) -> None:
    found = run("print('x' * 999)", limits=Limits(output_bytes=1000), isolated=isolated)
    assert (len(found.stdout), found.is_cut) == (1000, False)


def test_a_large_file_cannot_be_written(isolated: bool) -> None:
    program = "with open('a', 'wb') as file:\n    for _ in range(20): file.write(b'x' * (1 << 20))"
    found = run(program, limits=Limits(files_mb=8), isolated=isolated)
    assert found.exit_code != 0
    assert run(program, isolated=isolated).failure is None


# ------------------------------------------------------------------------------------------------ leaving things behind


def test_a_daemon_ends_with_its_program(isolated: bool) -> None:
    """It has a session and a group of its own, no parent, and holds the pipes open."""
    program = (
        "import os, time\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        os.write(write, b'up')\n        time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(os.read(read, 2))"
    )
    start = time.monotonic()
    assert run(program, limits=Limits(seconds=20), isolated=isolated).stdout == "b'up'\n"
    assert time.monotonic() - start < 20  # it is not waited for
    assert left_behind() == []


def test_a_daemon_with_another_environment_ends_too(isolated: bool) -> None:
    seconds = f"6{os.getpid()}"
    program = f"import subprocess\nsubprocess.Popen(['sleep', '{seconds}'], env={{}}, start_new_session=True)"
    assert run(program, isolated=isolated).failure is None
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            commands.append(process.cmdline())
    assert ["sleep", seconds] not in commands


def test_killing_its_parent_does_not_help_it(isolated: bool) -> None:
    program = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(1)\nprint('alive')"
    found = run(program, limits=Limits(seconds=5), isolated=isolated)
    if isolated:  # the first process of its namespace takes no signal from inside
        assert (found.exit_code, found.stdout) == (0, "alive\n")
    else:
        assert (found.exit_code, found.stdout) == (None, "")
        assert found.failure == "ended the process that had started it"


def test_what_it_made_unreadable_is_removed(isolated: bool) -> None:
    assert (
        run("import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)", isolated=isolated).exit_code == 0
    )


def test_links_that_it_made_are_removed_and_what_they_lead_to_is_not(isolated: bool, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "inside").mkdir(parents=True)
    for each in (other, other / "inside"):
        each.chmod(0o755)
    program = (
        f"import os\nos.makedirs('a/b')\nos.symlink({str(other)!r}, 'a/link')\nos.symlink('/usr', 'link')\n"
        f"os.symlink('/none', 'broken')\nos.chmod('a', 0)"
    )
    assert run(program, isolated=isolated).failure is None
    assert [path.stat().st_mode & 0o777 for path in (other, other / "inside")] == [0o755, 0o755]


def test_of_old_folders_links_and_those_of_others_are_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "inside").mkdir(parents=True)
    (other / "inside").chmod(0o755)
    link, own = folder / "megarl-sandbox-link", folder / "megarl-sandbox-own"
    link.symlink_to(other)
    own.mkdir()
    for path in (link, own):
        os.utime(path, (0, 0), follow_symlinks=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
        sandbox._remove_stale.__wrapped__()
    assert own.is_dir()
    sandbox._remove_stale.__wrapped__()
    assert not own.exists()
    assert (other / "inside").stat().st_mode & 0o777 == 0o755
    link.unlink()


def test_folders_of_killed_processes_are_removed_after_an_hour(folder: Path) -> None:
    for name, age in (("megarl-sandbox-old", 3700), ("megarl-sandbox-new", 3500), ("another", 3700)):
        (folder / name / "work").mkdir(parents=True)
        os.utime(folder / name, (time.time() - age,) * 2)
    sandbox._remove_stale.__wrapped__()
    assert sorted(path.name for path in folder.iterdir()) == ["another", "megarl-sandbox-new"]
    for path in folder.iterdir():
        sandbox._remove(str(path))


# ------------------------------------------------------------------------------------------------ isolation


def test_isolation_is_to_be_had_or_there_is_a_reason() -> None:
    assert PROBLEM is None or PROBLEM.strip()


@with_isolation
def test_files_outside_can_be_neither_read_nor_seen(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    home = os.path.expanduser("~")
    program = (
        f"import os\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', '/proc/self/environ', '/proc/1/root', '/sys'):\n"
        f"    assert not os.path.exists(path), path\n"
        f"    try: open(path)\n    except FileNotFoundError: pass\n    else: raise AssertionError(path)\n"
        f"seen = os.listdir({home!r}) if os.path.isdir({home!r}) else []\n"
        f"print(seen, sorted(os.listdir('/dev')))"
    )
    found = run(program)
    assert found.failure is None, found
    prefix = Path(os.path.realpath(sys.base_prefix))
    own = [prefix.relative_to(home).parts[0]] if prefix.is_relative_to(home) else []  # the interpreter may be there
    assert found.stdout == f"{own} ['full', 'null', 'random', 'urandom', 'zero']\n"


@with_isolation
def test_what_is_installed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the system's packages nor the interpreter's, also by their paths; what is beside them is."""
    system = tmp_path / "system"
    places = [system / "lib/python3/dist-packages", system / "lib64/python3.11/site-packages"]
    for place in places:
        place.mkdir(parents=True)
        (place / "installed.py").write_text("")
    (system / "lib/python3/beside.py").write_text("")
    monkeypatch.setattr(sandbox, "SYSTEM_FOLDERS", (*sandbox.SYSTEM_FOLDERS, str(system)))
    own = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    program = (
        f"import os, sys\n"
        f"for place in {[*map(str, places), own]!r}:\n"
        f"    if os.path.isdir(place): assert os.listdir(place) == [], place\n"
        f"    try: open(place + '/mark', 'w')\n    except OSError: pass\n    else: raise AssertionError(place)\n"
        f"    sys.path.append(place)\n"
        f"sys.path.append({str(system / 'lib/python3')!r})\n"
        f"import beside\n"
        f"for name in ('installed', 'pip'):\n"
        f"    try: __import__(name)\n    except ModuleNotFoundError: print(name)\n"
    )
    found = run(program)
    assert (found.failure, found.stdout) == (None, "installed\npip\n")
    assert all((place / "installed.py").exists() for place in places)


@with_isolation
def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    marks = [str(tmp_path / "mark"), "/usr/megarl_mark", os.path.join(os.path.realpath(sys.base_prefix), "megarl_mark")]
    program = (
        f"import os\n"
        f"for path in (*{marks!r}, '/mark', '/dev/mark', os.__file__):\n"
        f"    try: open(path, 'a').close()\n"
        f"    except OSError as error: print(type(error).__name__, error.strerror)\n"
        f"    else: raise AssertionError(path)\n"
    )
    try:
        found = run(program)
        assert found.failure is None, found
        assert found.stdout.split("\n")[1] == "OSError Read-only file system"
        assert not any(map(os.path.exists, marks))
    finally:
        for mark in marks:
            Path(mark).unlink(missing_ok=True)


@with_isolation
def test_it_cannot_reach_a_server_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0megarl_test_server")
        local.listen()
        program = (
            f"import socket\n"
            f"for family, address in ((socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})),\n"
            f"                        (socket.AF_UNIX, '\\0megarl_test_server')):\n"
            f"    try: socket.socket(family).connect(address)\n"
            f"    except OSError as error: print(type(error).__name__)\n"
        )
        outside = run(program, isolated=False)
        assert (outside.failure, outside.stdout) == (None, "")  # without isolation it can
        assert run(program).stdout == "OSError\nConnectionRefusedError\n"


@with_isolation
def test_memory_shared_by_other_processes_is_not_there() -> None:
    libc = ctypes.CDLL(None)
    key = 0x4D45_0000 + os.getpid() % 0x10000
    segment = libc.shmget(key, 4096, 0o1600)
    try:
        assert segment >= 0
        program = f"import ctypes\nprint(ctypes.CDLL(None).shmget({key}, 0, 0) >= 0)"
        assert run(program, isolated=False).stdout == "True\n"
        assert run(program).stdout == "False\n"
    finally:
        libc.shmctl(segment, 0, None)


@with_isolation
def test_it_has_no_rights_and_gets_none() -> None:
    """No capability, not even in a user namespace of its own; no trace of its parent."""
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def fails(name, *arguments):\n"
        "    assert getattr(libc, name)(*arguments) == -1, name\n"
        "fails('unshare', 0x10000000)\n"
        "fails('unshare', 0x20000)\n"
        "fails('mount', b'none', b'/sandbox', b'tmpfs', 0, None)\n"
        "fails('umount', b'/sandbox')\n"
        "fails('chroot', b'/sandbox')\n"
        "fails('sethostname', b'x', 1)\n"
        "fails('ptrace', 16, os.getppid(), 0, 0)\n"
        "fails('setuid', 0)\n"
        "assert libc.prctl(39, 0, 0, 0, 0) == 1  # no new privileges\n"
        "print(os.getuid(), os.getpid() < 10, os.getppid())"
    )
    assert run(program).stdout == "1000 True 1\n"


@with_isolation
def test_all_its_files_together_are_bounded() -> None:
    program = (
        "for i in range(4):\n    with open(str(i), 'wb') as file:\n"
        "        for _ in range(6): file.write(b'x' * (1 << 20))"
    )
    found = run(program, limits=Limits(files_mb=8))
    assert found.failure == "ended with exit code 1: OSError: [Errno 28] No space left on device"


# ------------------------------------------------------------------------------------------------ no sandbox


def test_why_there_is_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher fails as it does where the kernel refuses."""

    def refused(*arguments: object) -> Outcome:
        raise SandboxError("OSError: [Errno 1] unshare: EPERM Operation not permitted")

    monkeypatch.setattr(sandbox, "run", lambda *_, **__: refused())
    assert isolation_problem.__wrapped__() == "OSError: [Errno 1] unshare: EPERM Operation not permitted"
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: Outcome(None, "", False, "", "ran longer than 20 s"))
    assert isolation_problem.__wrapped__() == "ran longer than 20 s"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isolation_problem.__wrapped__() == "namespaces are Linux's, this is darwin"


def test_an_interpreter_that_is_not_there_is_an_error(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(SandboxError, match="/no/python"):
        run("", isolated=isolated)


def slow_launcher(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float) -> None:
    code = (
        f"import runpy, time\ntime.sleep({seconds})\nrunpy.run_path({sandbox_init.__file__!r}, run_name='__main__')\n"
    )
    (folder / "slow.py").write_text(code)
    monkeypatch.setattr(sandbox_init, "__file__", str(folder / "slow.py"))


def test_the_time_that_the_sandbox_takes_is_not_the_programs(
    isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_launcher(monkeypatch, tmp_path, 2.0)
    assert run("print(1)", limits=Limits(seconds=1.5), isolated=isolated) == Outcome(0, "1\n", False, "")


def test_a_sandbox_that_is_never_there_is_an_error(
    isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_START_LIMIT", 0.5)
    slow_launcher(monkeypatch, tmp_path, 60.0)
    with pytest.raises(SandboxError, match=r"there was no sandbox after 0.5 s"):
        run("print(1)", isolated=isolated)


def test_a_launcher_that_dies_is_an_error(isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such library')")
    monkeypatch.setattr(sandbox_init, "__file__", str(tmp_path / "broken.py"))
    with pytest.raises(SandboxError, match="the launcher ended before the program began: no such library"):
        run("print(1)", isolated=isolated)


def test_a_setup_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace or before it: a folder that cannot be mounted."""
    monkeypatch.setattr(sandbox, "SYSTEM_FOLDERS", ("/dev",))  # its own place is made once more
    with pytest.raises(SandboxError, match=r"\w+Error: "):
        run("")
