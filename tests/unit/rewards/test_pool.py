"""Rewards in processes of their own: hostile ones cost their own call and no other, and leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards import RewardPool, is_timeout, pool
from megarl.rewards.keeper import MAX_PROCESSES
from tests.pool_processes import processes

MODULE = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

def good(source, response, truth, info):
    return float(response == truth)

def number(source, response, truth, info):
    return float(response)

def mixed(source, response, truth, info):
    """What the response says; notes each call in a file."""
    with open(info["log"], "a") as file:
        file.write(response + "\\n")
    kind = response.split()[0]
    if kind == "raise":
        raise ValueError("bad")
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    if kind == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return float(response.split()[1])

def act(source, response, truth, info):
    """Run the response."""
    scope = {"info": info}
    exec("import asyncio, os, signal, subprocess, sys, threading, time\\n" + response, scope)
    return scope.get("score", 1.0)

async def judge(source, response, truth, info):
    await asyncio.sleep(0.01)
    return float(response) / 2

def batched(sources, responses, truths, infos):
    if "bad" in responses:
        raise ValueError("bad batch")
    return [float(response) + len(responses) / 1000 for response in responses]

batched.batch_size = 8

async def batched_judge(sources, responses, truths, infos):
    async def one(response):
        await asyncio.sleep(0.1)
        return float(response)
    return await asyncio.gather(*map(one, responses))

batched_judge.batch_size = 16
'''

ALL = ["good", "number", "mixed", "act", "judge", "batched", "batched_judge"]
Make = Callable[..., "Scoring"]


class Scoring:
    """A pool of the functions of MODULE."""

    def __init__(self, num_workers: int = 1, time_limit: float = 1.0, memory_mb: int = 256) -> None:
        self.pool = RewardPool([f"hostile_rewards:{name}" for name in ALL], num_workers, time_limit, memory_mb)

    def start(self, name: str, response: str, **info: Any) -> Any:
        return self.pool.submit(f"hostile_rewards:{name}", ("s", response, "8", info))

    def score(self, name: str, response: str, **info: Any) -> tuple[float, str | None]:
        return self.start(name, response, **info).result(timeout=30)

    def fails(self, response: str, **info: Any) -> str:
        """Why `act` of the response failed; the pool works before and after, and no process of the call is left."""
        assert self.score("good", "8") == (1.0, None)
        score, reason = self.score("act", response, **info)
        assert score == 0.0
        assert reason is not None
        assert self.score("good", "8") == (1.0, None)
        assert self.score("good", "9") == (0.0, None)
        assert len(processes()) == 2  # a keeper and its worker
        return reason


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, [process.as_dict(["pid", "ppid", "cmdline"]) for process in processes()]
        time.sleep(0.02)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hostile_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEGARL_TEST", str(os.getpid()))
    return tmp_path


@pytest.fixture
def make(module: Path) -> Iterator[Make]:
    """Makes pools; at the end they are closed and no process is left."""
    made: list[Scoring] = []

    def start(*arguments: Any, **options: Any) -> Scoring:
        made.append(Scoring(*arguments, **options))
        return made[-1]

    yield start
    for one in made:
        one.pool.close()
    assert processes() == []


# ------------------------------------------------------------------------------------------------ hostile rewards


def test_an_infinite_loop_is_killed_at_the_time_limit(make: Make) -> None:
    scoring = make(time_limit=0.5)
    scoring.score("good", "8")
    start = time.monotonic()
    score, reason = scoring.score("act", "while True: pass")
    assert 0.5 <= time.monotonic() - start < 1.5
    assert (score, reason) == (0.0, "reward timed out after 0.5 s")
    assert is_timeout(reason)
    assert not is_timeout("KeyError")
    assert not is_timeout(None)
    assert scoring.fails("while True: pass") == reason


def test_what_ignores_signals_and_leaves_its_session_is_killed_too(make: Make) -> None:
    """It and its child ignore what can be ignored; the child has a session of its own and no parent."""
    code = (
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)"
    )
    assert is_timeout(make(time_limit=0.5).fails(code))


def test_10_gb_of_memory_are_refused(make: Make) -> None:
    scoring = make()
    assert re.fullmatch(r"MemoryError.* \(reward.memory_mb is 256\)", scoring.fails("x = bytearray(10 * 2**30)"))
    # What a call keeps does not make the next one fail: the worker is another one.
    assert scoring.fails("sys.kept = []\nwhile True: sys.kept.append(bytearray(2**20))").startswith("MemoryError")
    assert scoring.score("act", "x = bytearray(100 * 2**20)") == (1.0, None)


def test_memory_of_many_processes_is_counted_together(make: Make) -> None:
    code = (
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = b'x' * (100 * 2**20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)"
    )
    assert make(time_limit=20).fails(code) == "the reward's processes took more than 256 MB (reward.memory_mb)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(3)", "the reward's process ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "the reward's process was killed by SIGKILL"),
        ("os.kill(0, signal.SIGTERM); time.sleep(9)", "the reward's process was killed by SIGTERM"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("raise KeyError('answer')", "KeyError: 'answer' (<string>:2)"),
        ("score = float('nan')", "the reward function gave nan, which is not finite"),
        ("score = '1.0'", "the reward function gave '1.0', which is no number"),
        ("score = None", "the reward function gave None, which is no number"),
        ("os.closerange(3, 256); time.sleep(9)", "the reward closed the connection of its process"),
        ("os.write(2, b'a  cry\\n'); os._exit(1)", "the reward's process ended with exit code 1; it printed: a cry"),
    ],
)
def test_every_end_has_its_reason(make: Make, code: str, reason: str) -> None:
    assert make().fails(code) == reason


def test_printing_megabytes_stops_nothing_and_goes_nowhere(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    scoring = make(time_limit=5)
    assert scoring.score("act", "print('x' * 10_000_000); sys.stderr.write('y' * 10_000_000); score = 0.5") == (
        0.5,
        None,
    )
    reason = scoring.fails("print('z' * 10_000_000); os._exit(1)")
    assert reason == "the reward's process ended with exit code 1; it printed: " + "z" * 200
    scoring.pool.close()
    assert capfd.readouterr() == ("", "")


def test_a_reward_that_reads_from_the_terminal_reads_nothing(make: Make) -> None:
    terminal, kept = os.pipe(), os.dup(0)
    os.write(terminal[1], b"typed")
    os.close(terminal[1])
    os.dup2(terminal[0], 0)
    try:
        assert make().score("act", "score = len(sys.stdin.read())") == (0.0, None)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(terminal[0])


@pytest.mark.parametrize("after", ["", "time.sleep(60)"])
def test_a_thousand_processes_are_killed(make: Make, after: str) -> None:
    code = f"for _ in range(1000):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)\n{after}"
    assert make(time_limit=20, memory_mb=8192).fails(code) == f"the reward had more than {MAX_PROCESSES} processes"


def test_a_fork_bomb_is_killed(make: Make) -> None:
    """Every process forks again, up to 2 to the power of 9."""
    code = "for _ in range(9): os.fork()\ntime.sleep(60)"
    assert make(time_limit=20, memory_mb=8192).fails(code) == f"the reward had more than {MAX_PROCESSES} processes"


def test_killing_the_parent_costs_that_call_alone(make: Make) -> None:
    """With it goes a child that has left the session."""
    code = (
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
        "time.sleep(0.1)\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    assert make().fails(code) == "the parent of the reward's process was killed by SIGKILL"


def test_stopping_the_parent_costs_that_call_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 0.5)
    reason = make(time_limit=0.5).fails("os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)")
    assert reason == "the parent of the reward's process was stopped"


def test_a_fork_that_comes_back_gives_no_second_answer(make: Make) -> None:
    scoring = make()
    for _ in range(5):
        assert scoring.score("act", "score = 1.0 if os.fork() else 2.0") == (1.0, None)
        assert scoring.score("number", "3") == (3.0, None)


def test_a_worker_that_ends_between_calls_is_replaced(make: Make) -> None:
    scoring = make()
    assert scoring.score("act", "threading.Timer(0.05, os._exit, (4,)).start()") == (1.0, None)
    time.sleep(0.3)
    assert scoring.score("good", "8") == (1.0, None)


def test_limits_of_the_worker(make: Make) -> None:
    """No core files, its own session, lower priority, first to go when memory runs out."""
    code = (
        "import resource\n"
        "ok = resource.getrlimit(resource.RLIMIT_CORE) == (0, 0) and os.getsid(0) == os.getpid()\n"
        "ok = ok and os.nice(0) >= info['nice'] + 5 and open('/proc/self/oom_score_adj').read() == '1000\\n'\n"
        "score = float(ok)"
    )
    assert make().score("act", code, nice=os.nice(0)) == (1.0, None)


def test_a_module_that_ends_the_process_on_import_fails_every_call_with_the_reason(module: Path) -> None:
    (module / "no_import.py").write_text("import os\nprint('no licence', flush=True)\nos._exit(5)\n")
    scoring = RewardPool(["no_import:score"], 2, 5.0, 256)
    futures = [scoring.submit("no_import:score", ("s", "8", "8", {})) for _ in range(5)]
    expected = "importing the reward: the reward's process ended with exit code 5; it printed: no licence"
    assert [future.result(timeout=30) for future in futures] == [(0.0, expected)] * 5
    scoring.close()
    assert processes() == []


def test_a_function_that_cannot_be_loaded_fails_alone(module: Path) -> None:
    scoring = RewardPool(["hostile_rewards:good", "hostile_rewards:gone"], 1, 5.0, 256)
    assert scoring.submit("hostile_rewards:good", ("s", "8", "8", {})).result(timeout=30) == (1.0, None)
    score, reason = scoring.submit("hostile_rewards:gone", ("s", "8", "8", {})).result(timeout=30)
    assert score == 0.0
    assert "has no 'gone'" in str(reason)
    scoring.close()


# ------------------------------------------------------------------------------------------------ async and batched


def test_async_functions_are_awaited(make: Make) -> None:
    assert make().score("judge", "8") == (4.0, None)


def test_a_batched_function_gets_what_is_waiting_up_to_its_batch_size(make: Make) -> None:
    """The thousandths of a score are the size of the batch it came in."""
    scoring = make()
    scoring.score("good", "8")
    first = scoring.start("act", "time.sleep(0.3)")
    futures = [scoring.start("batched", str(i)) for i in range(11)]
    one = scoring.start("number", "5")
    assert first.result(timeout=30) == (1.0, None)
    found = [future.result(timeout=30)[0] for future in futures]
    assert found == pytest.approx([i + (0.008 if i < 8 else 0.003) for i in range(11)])
    assert one.result(timeout=30) == (5.0, None)


def test_a_batch_that_raises_fails_as_one_and_the_next_does_not(make: Make) -> None:
    scoring = make()
    first = scoring.start("act", "time.sleep(0.2)")
    futures = [scoring.start("batched", "bad" if i == 2 else str(i)) for i in range(9)]
    assert first.result(timeout=30) == (1.0, None)
    found = [future.result(timeout=30) for future in futures]
    assert all(error is not None and error.startswith("ValueError: bad batch") for _, error in found[:8])
    assert found[8] == (8.001, None)


def test_an_async_batch_waits_for_its_calls_together(make: Make) -> None:
    scoring = make()
    first = scoring.start("act", "time.sleep(0.2)")
    futures = [scoring.start("batched_judge", str(i)) for i in range(16)]
    first.result(timeout=30)
    start = time.monotonic()
    assert [future.result(timeout=30)[0] for future in futures] == list(range(16))
    assert time.monotonic() - start < 0.8  # one after another: 1.6


# ------------------------------------------------------------------------------------------------ all together


def test_500_mixed_calls_are_each_scored_once_and_in_their_places(make: Make, module: Path) -> None:
    """Good calls carry their number; each is called exactly once, whatever happens to its neighbours."""
    scoring, draw, log = make(num_workers=3, time_limit=0.3), random.Random(7), str(module / "log")
    kinds = ["raise"] * 10 + ["exit"] * 6 + ["hang"] * 4 + ["kill"] * 4 + ["good"] * 476
    draw.shuffle(kinds)
    futures = [scoring.start("mixed", f"{kind} {i}", log=log) for i, kind in enumerate(kinds)]
    expected = {
        "raise": "ValueError: bad",
        "exit": "the reward's process ended with exit code 3",
        "hang": "reward timed out after 0.3 s",
        "kill": "the parent of the reward's process was killed by SIGKILL",
    }
    for i, (kind, future) in enumerate(zip(kinds, futures, strict=True)):
        score, reason = future.result(timeout=60)
        assert score == (float(i) if kind == "good" else 0.0)
        assert (reason or "").startswith(expected.get(kind, "")), (kind, reason)
        assert (reason is None) == (kind == "good")
    calls = sorted(Path(log).read_text().split("\n")[:-1])
    assert calls == sorted(f"{kind} {i}" for i, kind in enumerate(kinds))


def test_a_full_queue_makes_submit_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "QUEUE_PER_WORKER", 3)
    scoring = make()
    scoring.score("good", "8")
    start = time.monotonic()
    futures = [scoring.start("act", "time.sleep(0.1)") for _ in range(8)]
    # One is with the worker and three wait when the last is put in: four have ended.
    assert time.monotonic() - start >= 0.4
    assert len([f for f in futures if not f.done()]) <= 4
    assert [f.result(timeout=30) for f in futures] == [(1.0, None)] * 8


def test_a_reward_that_always_hangs_does_not_hold_the_step_for_its_limit_an_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 calls 4 are tried by two workers, then one at a time while the rest fails at once; one that comes back ends
    that. Another function is not touched."""
    monkeypatch.setattr(pool, "GIVE_UP_AFTER", 4)
    scoring = make(num_workers=2, time_limit=0.3)
    start = time.monotonic()
    futures = [scoring.start("act", "time.sleep(60)") for _ in range(40)]
    other = scoring.start("number", "5")
    reasons = [future.result(timeout=30)[1] for future in futures]
    assert time.monotonic() - start < 4.0  # each for 0.3 s by two workers: 6 s
    assert all(map(is_timeout, reasons))
    assert sum("not tried: so did the" in str(reason) for reason in reasons) >= 30
    assert other.result(timeout=30) == (5.0, None)
    assert scoring.score("act", "score = 2.0") == (2.0, None)
    assert [f.result(timeout=30) for f in [scoring.start("act", "score = 2.0") for _ in range(20)]] == [
        (2.0, None)
    ] * 20


# ------------------------------------------------------------------------------------------------ ends


def test_closing_fails_what_is_not_done_and_leaves_no_process(make: Make) -> None:
    scoring = make(num_workers=2, time_limit=60)
    futures = [scoring.start("act", "time.sleep(60)") for _ in range(5)]
    wait_until(lambda: len(processes()) == 4)
    time.sleep(0.2)
    start = time.monotonic()
    scoring.pool.close()
    assert time.monotonic() - start < 3
    assert [f.result(timeout=1) for f in futures] == [(0.0, "the reward pool is closed")] * 5
    assert scoring.score("good", "8") == (0.0, "the reward pool is closed")
    assert processes() == []
    scoring.pool.close()


OWNER = """
import os, sys, time
from megarl.rewards import RewardPool
pool = RewardPool(["hostile_rewards:act"], 2, 60.0, 256)
code = "import subprocess\\nif os.fork() == 0: os.setsid()\\nsubprocess.run(['sleep', '60'])"
futures = [pool.submit("hostile_rewards:act", ("s", code, "", {})) for _ in range(2)]
print("up", flush=True)
sys.stdin.readline()
if os.fork() == 0:  # a child that holds the sockets open
    time.sleep(60)
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_owner(module: Path, number: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(module), os.environ.get("PYTHONPATH", "")])}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        assert owner.stdout.readline() == "up\n"
        wait_until(lambda: len(processes()) >= 2 * 5)  # keeper, worker, its fork, and sleep of both
        owner.stdin.write("fork\n")
        assert owner.stdout.readline() == "forked\n"
        owner.send_signal(number)
        owner.wait(10)
        wait_until(lambda: processes() == [])
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait(10)
        for process in processes():
            process.kill()


# ------------------------------------------------------------------------------------------------ speed


def test_ready_made_functions_start_no_process(module: Path) -> None:
    scoring = RewardPool(["gsm8k", "exact"], 4, 1.0, 256)
    assert scoring.submit("gsm8k", ("s", "#### 8", "8", {})).result(timeout=0) == (1.0, None)
    score, reason = scoring.submit("gsm8k", ("s", "#### 8", "eight", {})).result(timeout=0)
    assert score == 0.0
    assert "is not a number" in str(reason)
    assert processes() == []
    with pytest.raises(ValueError, match="the reward pool has no function 'a:b'"):
        scoring.submit("a:b", ("s", "8", "8", {}))
    scoring.close()


def test_throughput_is_printed(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 2,048 answers: ready-made on the spot, and a trivial function of a user in two processes."""
    text = "We compute 3 * 4 = 12 and then add 5 to get 17. " * 12 + "\n#### 17"
    scoring = make(num_workers=2)
    scoring.score("good", "8")
    seconds = {}
    for name, full in (("gsm8k", "gsm8k"), ("a user's", "hostile_rewards:good")):
        start = time.perf_counter()
        futures = [scoring.pool.submit(full, ("openai/gsm8k", text, "17", {"index": i})) for i in range(2048)]
        assert all(future.result(timeout=30)[1] is None for future in futures)
        seconds[name] = time.perf_counter() - start
    with capsys.disabled():
        print("".join(f"\n2,048 answers by {name}: {1e3 * took:.0f} ms" for name, took in seconds.items()))
    assert seconds["gsm8k"] < 0.5
    assert seconds["a user's"] < 10
