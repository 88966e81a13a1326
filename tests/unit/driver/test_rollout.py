"""Prompts go out to replicas and come back in their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from megarl import config
from megarl.driver import rollout
from megarl.driver.rollout import ReplicaDied, Rollout, RolloutBatch, Starter
from megarl.engines.sglang import EngineDied
from megarl.types import Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee, WorkerError
from megarl.workers.generation import Group, Job

CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "rollout": {"tensor": 2},
        "cluster": {"gpus_per_node": 6},
        "run": {"deadline": 17},
    }
)


class Method:
    """A remote method: the call's reference is what it will give."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Method:
        def call(*arguments: Any) -> Any:
            self.called.append((name, *arguments))
            return [_answers(job) for job in arguments[0]] if name == "generate" else (self.number, name)

        return Method(call)


def _answers(job: Job) -> Group:
    infos = tuple(
        SampleInfo(
            f"{job.prompt.uid}/{k}", job.prompt.uid, len(job.prompt.token_ids), k + 1, k + 1, float(k), "stop", "s", 0
        )
        for k in range(job.num_answers)
    )
    return Group(infos, f"ref of {job.prompt.uid}", tuple((job.prompt.uid, str(k)) for k in range(job.num_answers)))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Callee], str, float]]:
    """`gather` gives the references back, and notes whom it was asked about."""
    asked: list[tuple[list[Callee], str, float]] = []

    def gather(refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        assert len(refs) == len(callees)
        asked.append((callees, stage, deadline))
        return refs

    monkeypatch.setattr(rollout, "gather", gather)
    return asked


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0-{i}", np.arange(i + 1), "s", "") for i in range(count)]


def submit(made: Rollout, count: int, answers: int = 2) -> None:
    made.submit(prompts(count), answers, SamplingParams(8), 5, "exact", with_texts=True)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_samples_come_in_the_order_of_their_prompts(gathered: list[Any], count: int) -> None:
    workers = [Worker(i) for i in range(3)]
    made = Rollout(CONFIG, workers, ["h0", "h1", "h2"], embedded=False)
    submit(made, count)
    batch = made.next_batch()
    assert [info.uid for info in batch.infos] == [f"0-{i}/{k}" for i in range(count) for k in range(2)]
    assert batch.groups == [[2 * i, 2 * i + 1] for i in range(count)]
    assert batch.handles == {2 * i + k: (f"ref of 0-{i}", k) for i in range(count) for k in range(2)}
    assert batch.texts == [(f"0-{i}", str(k)) for i in range(count) for k in range(2)]
    assert batch.lengths == [i + 1 + k + 1 for i in range(count) for k in range(2)]
    assert batch.num_tokens == sum(batch.lengths)
    # Shares differ by one prompt at the most, and a replica without a prompt is left alone.
    shares = [len(call[1]) for worker in workers for call in worker.called]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert len(shares) == min(count, 3)


def test_batches_come_in_the_order_of_submission(gathered: list[Any]) -> None:
    made = Rollout(CONFIG, [Worker(0), Worker(1)], ["h0", "h1"], embedded=False)
    submit(made, 3, answers=1)
    submit(made, 1, answers=1)
    with pytest.raises(AssertionError, match="in flight"):
        made.sleep()
    assert [len(made.next_batch().infos), len(made.next_batch().infos)] == [3, 1]
    with pytest.raises(AssertionError, match="without a batch"):
        made.next_batch()
    assert gathered[0] == ([Callee("SGLang replica 0", "h0"), Callee("SGLang replica 1", "h1")], "generation", 17)
    assert gathered[1][0] == [Callee("SGLang replica 0", "h0")]


def test_each_replica_gets_the_sockets_of_its_ranks() -> None:
    """Three replicas of two ranks."""
    workers = [Worker(i) for i in range(3)]
    made = Rollout(CONFIG, workers, ["h0", "h1", "h2"], embedded=False)
    calls = made.start_sync(4, ["s0", "s1", "s2", "s3", "s4", "s5"], 9, 7.0)
    assert calls == [((i, "sync"), Callee(f"SGLang replica {i}", f"h{i}")) for i in range(3)]
    assert [w.called for w in workers] == [
        [("sync", 4, ["s0", "s1"], 9, 7.0)],
        [("sync", 4, ["s2", "s3"], 9, 7.0)],
        [("sync", 4, ["s4", "s5"], 9, 7.0)],
    ]


def test_an_engine_on_gpus_of_its_own_keeps_its_memory_and_forgets_old_prefixes(gathered: list[Any]) -> None:
    own = config.build({"model": {"create": {}}, "data": {"create": {}}, "rollout": {"num_gpus": 2}})
    workers = [Worker(0), Worker(1)]
    made = Rollout(own, workers, ["h", "h"], embedded=False, gpus=[" (GPU 4)", " (GPU 5)"])
    made.sleep()
    made.wake_weights()
    made.resume()
    assert [worker.called for worker in workers] == [[("flush_cache",)]] * 2
    callees = [Callee("SGLang replica 0 (GPU 4)", "h"), Callee("SGLang replica 1 (GPU 5)", "h")]
    assert [asked[0] for asked in gathered] == [callees]


def test_memory_comes_and_goes_on_replicas_but_not_on_an_embedded_engine(gathered: list[Any]) -> None:
    replica, trainer = Worker(0), Worker(0)
    for worker, embedded in ((replica, False), (trainer, True)):
        made = Rollout(CONFIG, [worker], ["h"], embedded)
        made.sleep()
        made.wake_weights()
        made.resume()
        made.shutdown()
    assert replica.called == [
        ("sleep",),
        ("wake", ("weights",)),
        ("wake", ("kv_cache",)),
        ("flush_cache",),
        ("shutdown",),
    ]
    assert trainer.called == []


# ------------------------------------------------------------------------------------------------ replicas that die


class TaskError(Exception):
    """As Ray's: `cause` is what the worker raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


ENGINE_DIED = TaskError(EngineDied("generate: SGLang has died"))
PROCESS_DIED = RayActorError()
REFUSED = TaskError(RuntimeError("SGLang refused request 7"))


class Mortal(Worker):
    """Its answers to the n-th call of a method are taken from `fails`, where there is one."""

    def __init__(self, number: int, why: str | None = None, **fails: list[Exception | None]) -> None:
        super().__init__(number)
        self.why, self.fails = why, fails

    def __getattr__(self, name: str) -> Method:
        known = super().__getattr__(name)

        def call(*arguments: Any) -> Any:
            result = known.remote(*arguments)
            failure = (self.fails.get(name) or [None]).pop(0)
            return failure if failure is not None else self.why if name == "heartbeat" else result

        return Method(call)

    @property
    def asked(self) -> list[list[str]]:
        """The uids of the prompts in each call."""
        return [[job.prompt.uid for job in call[1]] for call in self.called if call[0] == "generate"]


class Stage:
    """Ray without processes: `start` makes workers anew from a list, and `killed` holds those that were ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[Any] = []
        self.waits = 0
        self.anew: list[Mortal] = []
        monkeypatch.setattr(rollout, "gather", self.gather)
        monkeypatch.setattr(rollout.ray, "kill", self.killed.append)

    def gather(self, refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        self.waits += 1
        for ref, callee in zip(refs, callees, strict=True):
            if isinstance(ref, Exception):
                raise WorkerError(f"{stage}: {callee.name} failed: {ref}") from ref
            if ref == "busy":
                raise WorkerError(f"{stage}: no answer within {deadline} s")
        return refs

    def rollout(self, workers: list[Mortal], most: int = 3) -> Rollout:
        starter = Starter(lambda replica: self.anew.pop(0), lambda replica, worker: worker.setup.remote(replica))
        own = replace(CONFIG, run=replace(CONFIG.run, max_replica_restarts=most))
        return Rollout(own, workers, [f"h{i}" for i in range(len(workers))], embedded=False, starter=starter)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def uids(batch: RolloutBatch) -> list[str]:
    return [info.uid for info in batch.infos]


def everything(count: int) -> list[str]:
    return [f"0-{i}/{k}" for i in range(count) for k in range(2)]


@pytest.mark.parametrize("failure", [ENGINE_DIED, PROCESS_DIED], ids=["engine", "process"])
def test_what_a_dead_replica_had_not_answered_is_asked_again_of_all_and_the_rest_is_kept(
    stage: Stage, failure: Exception
) -> None:
    workers = [Mortal(0), Mortal(1, "killed by SIGKILL", generate=[failure]), Mortal(2)]
    made, new = stage.rollout(workers), Mortal(3)
    dead, stage.anew = workers[1], [new]
    submit(made, 9)
    with pytest.raises(ReplicaDied, match="generation: SGLang replica 1 failed"):
        made.next_batch()
    assert (found := made.find_dead()) == {1: "killed by SIGKILL"}
    (message,) = made.replace(found)
    assert message.startswith("SGLang replica 1 on h1 died and was replaced in 0 s (1 of run.max_replica_restarts = 3)")
    assert message.endswith("killed by SIGKILL")
    assert stage.killed == [dead]
    assert [name for name, *_ in dead.called] == ["generate", "heartbeat", "shutdown"]
    assert new.called == [("setup", 1)]
    made.sleep()  # nothing is in flight meanwhile
    assert uids(made.next_batch()) == everything(9)
    assert workers[0].asked == [["0-0", "0-1", "0-2"], ["0-3"]]
    assert new.asked == [["0-4"]]
    assert workers[2].asked == [["0-6", "0-7", "0-8"], ["0-5"]]
    assert made.find_dead() == {}


def test_samples_that_lay_in_a_process_which_is_replaced_are_drawn_again(stage: Stage) -> None:
    """The second replica dies first; then the first, which had answered."""
    workers = [Mortal(0, generate=[None, ENGINE_DIED]), Mortal(1, "killed", generate=[PROCESS_DIED])]
    made, stage.anew = stage.rollout(workers), [Mortal(2), Mortal(3)]
    submit(made, 4)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    made.replace(made.find_dead())
    with pytest.raises(ReplicaDied):
        made.next_batch()
    workers[0].why = "killed too"
    made.replace(made.find_dead())
    assert uids(made.next_batch()) == everything(4)
    assert made.workers[0].asked == [["0-0", "0-1"]]
    assert made.workers[1].asked == [["0-3"], ["0-2"]]


def test_batches_behind_the_one_that_failed_are_kept_too(stage: Stage) -> None:
    workers = [Mortal(0), Mortal(1, "killed", generate=[ENGINE_DIED, ENGINE_DIED])]
    made, stage.anew = stage.rollout(workers), [Mortal(2)]
    submit(made, 4)
    submit(made, 2)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    made.replace(made.find_dead())
    assert [uids(made.next_batch()), uids(made.next_batch())] == [everything(4), everything(2)]
    assert workers[0].asked == [["0-0", "0-1"], ["0-0"], ["0-2"], ["0-1"]]


def test_a_failure_of_a_living_replica_is_raised_at_once_and_as_it_is(stage: Stage) -> None:
    made = stage.rollout([Mortal(0, generate=[REFUSED]), Mortal(1)])
    submit(made, 4)
    with pytest.raises(WorkerError, match="refused request 7") as raised:
        made.next_batch()
    assert not isinstance(raised.value, ReplicaDied)
    assert stage.waits == 1  # the others may go on for long


def test_more_deaths_than_allowed_are_an_error_with_all_reasons(stage: Stage) -> None:
    workers = [Mortal(0, "out of memory"), Mortal(1)]
    made, stage.anew = stage.rollout(workers, most=1), [Mortal(2)]
    made.replace(made.find_dead())
    workers[1].why = "killed by SIGKILL"
    with pytest.raises(WorkerError) as raised:
        made.find_dead()
    for part in (
        "2 SGLang replicas have died",
        "max_replica_restarts = 1",
        "0 on h0: out of memory",
        "1 on h1: killed",
    ):
        assert part in str(raised.value)


def test_a_replica_that_does_not_answer_is_dead_or_busy(stage: Stage) -> None:
    made = stage.rollout([Mortal(0), Mortal(1, "busy")])
    assert made.find_dead(patience=3.0) == {}
    assert list(made.find_dead()) == [1]


def test_the_process_of_a_dead_replica_says_where_its_log_ends(stage: Stage, tmp_path: Path) -> None:
    log = tmp_path / "sglang_0.log"
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    made = stage.rollout([Mortal(0, heartbeat=[PROCESS_DIED])])
    made._starter = replace(made._starter, logs=[str(log)])
    assert made.find_dead()[0].splitlines() == [
        "its process died",
        f"--- the end of {log}:",
        *(f"line {i}" for i in range(12, 20)),
    ]


def test_sleep_passes_over_a_dead_engine_but_not_over_lost_answers(stage: Stage) -> None:
    workers = [Mortal(0, sleep=[ENGINE_DIED, ENGINE_DIED]), Mortal(1)]
    stage.rollout(workers).sleep()
    assert workers[1].called[-1] == ("sleep",)
    with pytest.raises(WorkerError, match="engine sleep: SGLang replica 0 failed"):
        stage.rollout([Mortal(0, sleep=[PROCESS_DIED] * 2), Mortal(1)]).sleep()
