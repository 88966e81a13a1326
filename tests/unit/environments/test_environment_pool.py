"""An environment in processes of its own: hostile ones cost their own step and no other, and leave nothing behind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.environments import Environments, Step, calls
from megarl.environments.calls import read
from megarl.rewards import is_timeout
from megarl.types import Prompt
from tests.pool_processes import processes

MODULE = """
import asyncio, math, os, sys, time
import numpy as np
from megarl.environments import Step

class Scripted:
    def __init__(self):
        self.calls = 0

    def reset(self, data_source, ground_truth, extra_info):
        if "run" in extra_info:
            return eval(extra_info["run"])
        return {"source": data_source, "truth": ground_truth, "info": extra_info, "pid": os.getpid()}

    async def step(self, state, answer):
        await asyncio.sleep(0)
        scope = {"state": state, "step": Step(state, "heard " + answer, done=False)}
        exec("import json, math, os, signal, sys, time\\nimport numpy as np\\nfrom megarl.environments import Step\\n"
             "import megarl\\n" + answer, scope)
        return scope["step"]

class Count:
    def reset(self, data_source, ground_truth, extra_info):
        return {"turn": 0}
    def step(self, state, answer):
        state["turn"] += 1
        return Step(state, f"turn {state['turn']}: {answer}", state["turn"] / 4, state["turn"] >= 3, "user")
"""

Make = Callable[..., Environments]


def prompt(**extra_info: Any) -> Prompt:
    return Prompt("0-1", np.array([1]), "openai/gsm8k", "72", extra_info)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes environments; at the end they are closed and no process is left."""
    (tmp_path / "hostile_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEGARL_TEST", str(os.getpid()))
    made: list[Environments] = []

    def start(
        name: str = "hostile_tools:Scripted", num_workers: int = 1, time_limit: float = 1.0, memory_mb: int = 256
    ) -> Environments:
        made.append(Environments(name, num_workers, time_limit, memory_mb))
        return made[-1]

    yield start
    for one in made:
        one.close()
    assert processes() == []


def step(
    environments: Environments, answer: str, state: dict[str, Any] | None = None
) -> tuple[Step | None, str | None]:
    return environments.step({"a": 1} if state is None else state, answer).result(timeout=30)


def test_the_calculator_runs_on_the_spot_without_a_process(make: Make) -> None:
    environments = make("calculator")
    threads = threading.active_count()
    opened = environments.reset(prompt(index=3))
    assert opened.done()
    assert opened.result() == ({}, None)
    taken = environments.step({}, "<calc>6*7</calc>")
    assert taken.done()
    assert taken.result() == (Step({}, "42", None, False, "tool"), None)
    assert environments.step({}, "42").result() == (Step({}), None)
    assert (processes(), threading.active_count()) == ([], threads)


def test_state_goes_in_and_comes_out_whatever_process_has_it(make: Make) -> None:
    environments = make("hostile_tools:Count", num_workers=2)
    states = [environments.reset(prompt()).result(timeout=30)[0] for _ in range(4)]
    given = [dict(state or {}) for state in states]
    for turn in (1, 2, 3):
        futures = [environments.step(state, f"a{i}") for i, state in enumerate(given)]
        found = [future.result(timeout=30) for future in futures]
        expected = [Step({"turn": turn}, f"turn {turn}: a{i}", turn / 4, turn == 3, "user") for i in range(4)]
        assert found == [(one, None) for one in expected]
        given = [{"turn": turn} for _ in given]


def test_a_reset_has_the_rows_own_facts_and_runs_elsewhere(make: Make) -> None:
    state, error = make().reset(prompt(index=7, names=["a"])).result(timeout=30)
    assert error is None
    assert state is not None
    assert state.pop("pid") != os.getpid()
    assert state == {"source": "openai/gsm8k", "truth": "72", "info": {"index": 7, "names": ["a"]}}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", "environment timed out after 1 s"),
        ("1 / 0", "ZeroDivisionError: division by zero (<string>:5)"),
        ("os._exit(3)", "the environment's process ended with exit code 3"),
        ("os.kill(os.getppid(), 9); time.sleep(9)", "the parent of the environment's process was killed by SIGKILL"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("x = bytearray(10 * 2**30)", "MemoryError (<string>:5) (environment.memory_mb is 256)"),
        ("step = None", "the environment's step gave None, which is no Step"),
        ("step = ('text', 1.0)", "the environment's step gave ('text', 1.0), which is no Step"),
        ("step = Step(3)", "the environment's step gave the state 3, which is no mapping"),
        ("step = Step({1: 2})", "the environment's step gave a state with the key 1, which is no text"),
        ("step = Step({'a': [{2: 3}]})", "the environment's step gave a state with the key 2, which is no text"),
        (
            "step = Step({'a': {1}})",
            "the environment's step gave the state {'a': {1}}, which JSON cannot hold: Object of type set is not JSON "
            "serializable",
        ),
        (
            "step = Step({'a': math.nan})",
            "the environment's step gave the state {'a': nan}, which JSON cannot hold: Out of range float values are "
            "not JSON compliant: nan",
        ),
        ("step = Step({}, 84)", "the environment's step gave the observation 84, which is no text"),
        ("step = Step({}, b'84')", "the environment's step gave the observation b'84', which is no text"),
        ("step = Step({}, reward=math.inf)", "the environment's step gave the reward inf, which is not finite"),
        ("step = Step({}, reward='1')", "the environment's step gave the reward '1', which is no number"),
        ("step = Step({}, done='no')", "the environment's step gave done = 'no', which is neither True nor False"),
        (
            "step = Step({}, role='assistant')",
            "the environment's step gave the role 'assistant', which is none of tool, user, system",
        ),
    ],
)
def test_every_failure_has_its_reason_and_costs_one_step(make: Make, code: str, error: str) -> None:
    environments = make()
    assert step(environments, "pass") == (Step({"a": 1}, "heard pass", None, False, "tool"), None)
    found = step(environments, code)
    assert (found[0], (found[1] or "").removesuffix(": nan")) == (None, error.removesuffix(": nan"))
    assert is_timeout(found[1]) == (code == "while True: pass")
    assert step(environments, "pass") == (Step({"a": 1}, "heard pass", None, False, "tool"), None)
    assert len(processes()) == 2  # a keeper and its worker


def test_a_reset_fails_with_its_reason(make: Make) -> None:
    environments = make()
    for run, error in (
        ("{}[1]", "KeyError: 1 (<string>:1)"),
        ("[]", "the environment's reset gave the state [], which is no mapping"),
        ("time.sleep(60)", "environment timed out after 1 s"),
    ):
        assert environments.reset(prompt(run=run)).result(timeout=30) == (None, error)
    state, error = environments.reset(prompt(thread=threading.Lock())).result(timeout=30)
    assert state is None
    assert str(error).startswith("extra_info cannot be sent to the environment's process: TypeError")
    assert environments.reset(prompt(run="{'b': [1, (2.5, None)]}")).result(timeout=30) == (
        {"b": [1, [2.5, None]]},
        None,
    )


def test_numbers_of_numpy_are_numbers_and_half_a_character_is_replaced(make: Make) -> None:
    environments = make()
    code = "step = Step({}, 'a\\ud800b', np.float32(0.5), np.bool_(True))"
    assert step(environments, code) == (Step({}, "a?b", 0.5, True), None)
    found, _ = step(environments, "step = Step({}, reward=np.array(2))")
    assert found is not None
    assert (found.reward, type(found.reward)) == (2.0, float)


def test_an_environment_that_cannot_be_loaded_says_so_at_every_call(make: Make) -> None:
    environments = make("hostile_tools:Gone")
    for found in (environments.reset(prompt()).result(timeout=30), step(environments, "x")):
        assert found[0] is None
        assert "my_tools" not in str(found[1])
        assert "environment 'hostile_tools:Gone': hostile_tools has no 'Gone'" in str(found[1])


def test_closing_fails_what_is_not_done(make: Make) -> None:
    environments = make(time_limit=60)
    assert step(environments, "pass")[1] is None
    waiting = [environments.step({}, "time.sleep(60)") for _ in range(3)]
    environments.close()
    assert [future.result(timeout=30) for future in waiting] == [(None, "the environment pool is closed")] * 3
    assert step(environments, "pass") == (None, "the environment pool is closed")


def test_futures_tell_when_they_are_done(make: Make) -> None:
    done = threading.Event()
    future: Any = make().step({}, "pass")
    future.add_done_callback(lambda _: done.set())
    assert done.wait(30)


# ------------------------------------------------------------------------------------------------ what a worker writes

TAMPER = """
import gc, socket
own = [o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0 and o.getblocking()]
content = b"R" + {content!r}
for one in own:
    one.sendall(len(content).to_bytes(4, "big") + content)
time.sleep(5)
"""


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"[]",
        b"[[null, null]]",
        b'[[{"state": {}, "observation": 3, "reward": null, "done": true, "role": "tool"}, null]]',
        b'[[{"state": {}, "observation": "", "reward": NaN, "done": true, "role": "tool"}, null]]',
        b'[[{"state": [], "observation": "", "reward": null, "done": true, "role": "tool"}, null]]',
        b'[[{"state": {}, "observation": "", "reward": null, "done": true, "role": "assistant"}, null]]',
        b'[[{"state": {}, "more": 1}, null]]',
        b"[" * 100_000,
    ],
)
def test_what_a_worker_forged_is_no_step(make: Make, content: bytes) -> None:
    environments = make(time_limit=5)
    assert step(environments, TAMPER.format(content=content)) == (
        None,
        "the environment's process gave no state or step",
    )


def test_a_forged_step_that_is_well_formed_is_one(make: Make) -> None:
    """So the test above reaches the check it means to reach."""
    value = {"state": {"a": 2}, "observation": "b", "reward": 1, "done": False, "role": "user"}
    content = json.dumps([[value, None]]).encode()
    assert step(make(time_limit=5), TAMPER.format(content=content)) == (Step({"a": 2}, "b", 1.0, False, "user"), None)


def test_a_result_is_read_as_it_was_made() -> None:
    class Own:
        def reset(self, data_source: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
            return {"kept": extra_info}

        def step(self, state: dict[str, Any], answer: str) -> Step:
            state["changed"] = True
            return Step(state, answer, 0.25, False, "system")

    reset: calls.Call = ("reset", ("s", "t", {"i": [1, {"j": None}]}))
    assert read(reset, calls.make(Own(), reset)[0]) == {"kept": {"i": [1, {"j": None}]}}
    state = {"a": 1}
    call: calls.Call = ("step", (state, "answer"))
    assert read(call, calls.make(Own(), call)[0]) == Step({"a": 1, "changed": True}, "answer", 0.25, False, "system")
    assert state == {"a": 1}
