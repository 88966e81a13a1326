"""Programs in answers, by their tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.config import RewardConfig
from megarl.rewards import BUILTIN, RewardPool, sandbox
from megarl.rewards.code import check_isolation, failures, last_block, read_tests, score

ADD = "def add(a, b):\n    return a + b\n"
ECHO = "for _ in range(int(input())):\n    a, b = input().split()\n    print(int(a) + int(b))\n"
ASSERTIONS = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]}
PROGRAMS = {"inputs": ["1\n2 3\n", "2\n0 0\n-5 2\n"], "outputs": ["5\n", "0\n-3\n"]}


def block(program: str) -> str:
    return f"I add them:\n```python\n{program}```\nDone."


def graded(program: str, truth: dict[str, Any], **options: Any) -> float:
    """Here too where the machine has no namespaces; what they add is test_sandbox's."""
    return score("s", block(program), json.dumps(truth), {}, allow_unsandboxed=True, **options)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\n", "x = 2\n"),
        ("```Python3\nx = 1\n```\n```\noutput\n```\n```sh\nls\n```", "x = 1\n"),
        ("1. first\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python\n```", ""),
        ("```\nx = 1\n```", None),
        ("x = 1", None),
        ("```python x = 1```", None),
    ],
)
def test_the_last_closed_block(response: str, program: str | None) -> None:
    assert last_block(response) == program


@pytest.mark.parametrize(
    ("program", "truth", "all_or_nothing", "share"),
    [
        (ADD, ASSERTIONS, 1.0, 1.0),
        ("def add(a, b):\n    return int(a) + int(b)\n", ASSERTIONS, 0.0, 2 / 3),
        ("def add(a, b):\n    return 3\n", ASSERTIONS, 0.0, 1 / 3),
        ("def plus(a, b):\n    return a + b\n", ASSERTIONS, 0.0, 0.0),
        ("def add(a, b:\n", ASSERTIONS, 0.0, 0.0),
        (ECHO, PROGRAMS, 1.0, 1.0),
        ("print(5)\n", PROGRAMS, 0.0, 0.5),
        ("print('5  \\n\\n')\n", PROGRAMS, 0.0, 0.5),
        ("print(' 5')\n", PROGRAMS, 0.0, 0.0),
        ("print(5); import sys; sys.exit(1)\n", PROGRAMS, 0.0, 0.0),
        ("print(5 if input() == '1' else 1 / 0)\n", PROGRAMS, 0.0, 0.5),
    ],
)
def test_the_score_is_one_for_all_tests_or_the_share_of_them(
    program: str, truth: dict[str, Any], all_or_nothing: float, share: float
) -> None:
    assert graded(program, truth) == all_or_nothing
    assert graded(program, truth, partial=True) == pytest.approx(share)


def test_each_test_gets_the_program_anew() -> None:
    program = "seen = []\ndef add(a, b):\n    seen.append(1)\n    return len(seen)\n"
    assert graded(program, {"tests": ["assert add(0, 0) == 1", "assert add(0, 0) == 1"]}) == 1.0


def test_the_programs_own_main_is_not_run_and_its_classes_work() -> None:
    program = (
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "def add(a, b):\n    return Point(a).x + b\n"
        "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"
    )
    assert graded(program, {"tests": ["assert add(1, 2) == 3"]}) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "raise SystemExit\n",
        "import builtins\nbuiltins.AssertionError = Warning\n",
        "import sys\nsys.excepthook = lambda *_: None\n",
        "import atexit, os\natexit.register(os._exit, 0)\n",
        '"""',
        "x = (\n",
    ],
)
def test_leaving_before_the_test_is_not_passing_it(program: str) -> None:
    assert graded(program, ASSERTIONS, partial=True) == 0.0


def test_a_thread_that_does_not_end_holds_nothing_up() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + ADD
    assert graded(program, ASSERTIONS) == 1.0


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("def add(a, b):\n    while True: pass\n", "ran longer than 1 s"),
        ("x = bytearray(10 << 30)\n", "ended with exit code 1: MemoryError"),
        ("import os, time\nfor _ in range(8): os.fork()\ntime.sleep(60)\n", "had more than 16 processes"),
        ("def add(a, b):\n    return 4\n", "ended with exit code 1: AssertionError"),
        ("import sys\nsys.exit(0)\n", "ended before the test did"),
    ],
)
def test_every_failure_is_explained(program: str, start: str) -> None:
    isolated = sandbox.isolation_problem() is None
    seconds = 1 if start.startswith("ran") else 20
    tests = read_tests(json.dumps({"tests": ["assert add(1, 2) == 3"], "seconds": seconds}))
    (failure,) = failures(program, tests, isolated, time_limit=30.0)
    assert str(failure).startswith(start)


def test_what_is_wrong_with_the_output_is_explained() -> None:
    isolated = sandbox.isolation_problem() is None
    tests = read_tests(json.dumps({"inputs": ["1\n", "1\n"], "outputs": ["2\n", "1\n"]}))
    assert list(failures("print(input())", tests, isolated, 30.0)) == ["wrote '1\\n', not '2\\n'", None]
    (failure, _) = failures("print('x' * 2_000_000)", tests, isolated, 30.0)
    assert failure == "wrote more than 1048576 bytes"


def test_all_tests_together_have_a_time_limit() -> None:
    isolated = sandbox.isolation_problem() is None
    tests = read_tests(json.dumps({"tests": ["x"] * 4, "seconds": 1.0}))
    found = list(failures("while True: pass", tests, isolated, time_limit=1.5))
    assert found[0] == "ran longer than 1 s"
    assert found[2:] == ["not tried: the tests before it took 1.5 s"] * 2


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("3", 'must have "tests", or "inputs" and "outputs", and may "seconds"; has int'),
        ("add", "ground_truth 'add' is not JSON"),
        ("{}", "has dict"),
        ('{"tests": ["x"], "inputs": ["1"]}', "has inputs, tests"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', "has fn_name, inputs, outputs"),
        ('{"tests": []}', "tests must be lists of texts, one at least"),
        ('{"tests": "x"}', "tests must be lists of texts"),
        ('{"inputs": [1], "outputs": ["1"]}', "inputs and outputs must be lists of texts"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "has 2 inputs and 1 outputs"),
        ('{"tests": ["x"], "seconds": 0}', "seconds is 0, must be a number above 0"),
        ('{"tests": ["x"], "seconds": true}', "seconds is True"),
        ('{"tests": ["x"], "seconds": NaN}', "seconds is nan"),
    ],
)
def test_a_ground_truth_that_has_no_tests_is_an_error(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score("s", block(ADD), truth, {}, allow_unsandboxed=True)


# ------------------------------------------------------------------------------------------------ without isolation


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "unshare: EPERM")


@pytest.mark.usefixtures("no_namespaces")
def test_without_isolation_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was run")

    monkeypatch.setattr(sandbox, "run", never)
    message = r"not run without isolation \(unshare: EPERM\).* reward.allow_unsandboxed_code=true"
    with pytest.raises(ValueError, match=message):
        score("s", block(ADD), json.dumps(ASSERTIONS), {})
    with pytest.raises(ValueError, match=message):
        check_isolation(False)


@pytest.mark.usefixtures("no_namespaces")
def test_where_that_is_allowed_it_is_run_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    check_isolation(True)
    seen: list[bool] = []
    run = sandbox.run
    monkeypatch.setattr(sandbox, "run", lambda *arguments: seen.append(arguments[3]) or run(*arguments))
    assert graded(ADD, ASSERTIONS) == 1.0
    assert seen == [False] * 3


def test_with_isolation_it_is_used_also_where_less_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: None)
    monkeypatch.setattr(
        sandbox, "run", lambda *arguments: seen.append(arguments[3]) or sandbox.Outcome(1, "", False, "")
    )
    assert graded(ADD, ASSERTIONS) == 0.0
    assert seen == [True]


# ------------------------------------------------------------------------------------------------ in the pool


def test_in_the_pool_hostile_programs_cost_their_own_score_and_no_process() -> None:
    reward = RewardConfig("code", num_workers=1, time_limit=20.0, memory_mb=1024, allow_unsandboxed_code=True)
    assert "code" not in BUILTIN
    pool = RewardPool(["code"], 1, reward.time_limit, reward.memory_mb, reward.options)
    truth = json.dumps({**ASSERTIONS, "seconds": 1.0})

    def submit(program: str) -> tuple[float, str | None]:
        return pool.submit("code", ("s", block(program), truth, {})).result(timeout=60)

    try:
        assert submit(ADD) == (1.0, None)
        for program in ("while True: pass\n", "import os\nos.kill(os.getppid(), 9)\n", "x = bytearray(10 << 30)\n"):
            assert submit(program) == (0.0, None)
        assert submit("print('x' * 10_000_000)\n" + ADD) == (1.0, None)
    finally:
        pool.close()


def test_the_configuration_reaches_the_function_by_options() -> None:
    assert RewardConfig("code", time_limit=5.0).options == {"code": {"allow_unsandboxed": False, "time_limit": 4.0}}
    assert RewardConfig("code", allow_unsandboxed_code=True).options["code"]["allow_unsandboxed"] is True


def test_options_reach_the_pools_processes() -> None:
    given = {"partial": True, "allow_unsandboxed": True, "time_limit": 20.0}
    pool = RewardPool(["code"], 1, 30.0, 1024, {"code": given, "exact": {}})
    two_of_three = block("def add(a, b):\n    return int(a) + int(b)\n")
    try:
        found = pool.submit("code", ("s", two_of_three, json.dumps(ASSERTIONS), {})).result(timeout=60)
    finally:
        pool.close()
    assert found == (pytest.approx(2 / 3), None)


def test_an_option_that_it_does_not_take_is_the_reason() -> None:
    pool = RewardPool(["code"], 1, 20.0, 1024, {"code": {"strict": True}})
    try:
        found, reason = pool.submit("code", ("s", block(ADD), json.dumps(ASSERTIONS), {})).result(timeout=60)
    finally:
        pool.close()
    assert found == 0.0
    assert "unexpected keyword argument 'strict'" in str(reason)
