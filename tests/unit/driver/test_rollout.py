"""Prompts go out to replicas and come back in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from megarl import config
from megarl.driver import rollout
from megarl.driver.rollout import ReplicaDied, Rollout, RolloutBatch, Starter
from megarl.engines.sglang import EngineDied
from megarl.types import Activity, Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee, WorkerError
from megarl.workers.generation import Group, Job, Stopped, Taken, Trajectory

CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "rollout": {"tensor": 2},
        "cluster": {"gpus_per_node": 6},
        "run": {"deadline": 17},
    }
)


class Ref:
    """A call's reference: what it will give, or why it fails, is found when somebody looks."""

    def __init__(self, worker: Worker, find: Callable[[], Any]) -> None:
        self.worker, self.find = worker, find

    def get(self) -> Any:
        if not hasattr(self, "value"):
            self.value = self.find()
        return self.value


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class Worker:
    """A replica's process. It answers all that it holds, unless `takes` says otherwise: when which prompts have ended,
    call by call. From the `dies_in`-th call of a method on, it and all after it fail by `death`."""

    def __init__(self, number: int, why: str | None = None, **fails: list[Exception | None]) -> None:
        self.number, self.why, self.fails = number, why, fails
        self.called: list[tuple[Any, ...]] = []
        self.held: dict[int, Job] = {}
        self.takes: list[tuple[float, list[str]]] = []
        self.ended: dict[str, tuple[float, ...]] = {}
        """By prompt, seconds to the end of each answer."""
        self.num_ended = 0
        """Answers of prompts that it holds which have ended, while others of theirs go on."""
        self.ends_in_stop: list[str] = []
        self.clock = Clock()
        self.death: Exception | None = None

    def __getattr__(self, name: str) -> Method:
        def call(*arguments: Any) -> Ref:
            self.called.append((name, *arguments))
            failure = (self.fails.get(name) or [None]).pop(0)
            if failure is not None and name in ("submit_jobs", "take_groups", "stop_jobs"):
                self.death = failure
            if name in ("submit_jobs", "take_groups", "stop_jobs") and self.death is not None:
                failure = self.death
            if failure is not None:
                return Ref(self, lambda: failure)
            if name == "submit_jobs":
                self.held.update(arguments[0])
            answers: dict[str, Callable[[], Any]] = {
                "submit_jobs": lambda: None,
                "take_groups": lambda: self.take(),
                "stop_jobs": lambda: self.stop(),
                "heartbeat": lambda: self.why,
            }
            return Ref(self, answers.get(name, lambda: (self.number, name)))

        if name.startswith("_"):
            raise AttributeError(name)
        return Method(call)

    def take(self) -> Taken:
        uids = [job.prompt.uid for job in self.held.values()]
        if self.takes:
            self.clock.now, uids = self.takes.pop(0)
        groups = self.groups(uids)
        held = sum(job.num_trajectories for job in self.held.values())
        return Taken(groups, Activity(1, 2.0, 4.0), held - self.num_ended)

    def stop(self) -> Stopped:
        groups, held = self.groups(self.ends_in_stop), self.held
        self.held = {}
        begun = Trajectory(num_turns=self.number + 1)
        return Stopped(groups, {n: replace(job, begun=(begun,) * job.num_answers) for n, job in held.items()})

    def groups(self, uids: Sequence[str]) -> dict[int, Group]:
        numbers = [number for number, job in self.held.items() if job.prompt.uid in uids]
        return {number: self.answers(self.held.pop(number)) for number in numbers}

    def answers(self, job: Job) -> Group:
        uid, length = job.prompt.uid, len(job.prompt.token_ids)
        infos = tuple(
            SampleInfo(f"{uid}/{k}", uid, length, k + 1, k + 1, float(k), "stop", "s", 0)
            for k in range(job.num_answers)
        )
        texts = tuple((uid, str(k)) for k in range(job.num_answers))
        ended = self.ended.get(uid, ())
        return Group(infos, f"ref of {uid}", texts, ended, max(ended, default=0.0) + 0.5, 4 * length, length)

    def calls(self, *names: str) -> list[str]:
        return [name for name, *_ in self.called if name in names]

    @property
    def asked(self) -> list[list[str]]:
        """The uids of the prompts in each call."""
        return [[job.prompt.uid for job in call[1].values()] for call in self.called if call[0] == "submit_jobs"]


class Clock:
    now = 100.0


class TaskError(Exception):
    """As Ray's: `cause` is what the worker raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


ENGINE_DIED = TaskError(EngineDied("generate: SGLang has died"))
PROCESS_DIED = RayActorError()
REFUSED = TaskError(RuntimeError("SGLang refused request 7"))


class Stage:
    """Ray without processes: `anew` has the workers that are started, `killed` those that were ended, `asked` whom
    `gather` was asked about. Time stands still but where a worker or `waits_for` moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[Any] = []
        self.anew: list[Worker] = []
        self.asked: list[tuple[list[Callee], str, float]] = []
        self.first: list[int] = []
        """Numbers of the workers whose calls end first; else the first of those that are waited for."""
        self.is_silent = False
        """No call ever ends."""
        self.clock = Clock()
        monkeypatch.setattr(rollout, "gather", self.gather)
        monkeypatch.setattr(rollout.ray, "kill", self.killed.append)
        monkeypatch.setattr(rollout.ray, "wait", self.wait)
        now = SimpleNamespace(perf_counter=lambda: self.clock.now, monotonic=lambda: self.clock.now)
        monkeypatch.setattr(rollout, "time", now)

    def gather(self, refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        self.asked.append((callees, stage, deadline))
        values = [ref.get() for ref in refs]
        for value, callee in zip(values, callees, strict=True):
            if isinstance(value, Exception):
                raise WorkerError(f"{stage}: {callee.name} failed: {value}") from value
            if value == "busy":
                raise WorkerError(f"{stage}: no answer within {deadline} s")
        return values

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert refs, "Ray does not wait for nothing"
        if self.is_silent:
            self.clock.now += timeout
            return [], refs
        ref = refs[0]
        if self.first:
            number = self.first.pop(0)
            (ref,) = (ref for ref in refs if ref.worker.number == number)
        return [ref], [other for other in refs if other is not ref]

    def rollout(self, workers: list[Worker], most: int = 3, running: int = 1024, **changes: Any) -> Rollout:
        for worker in (*workers, *self.anew):
            worker.clock = self.clock
        starter = Starter(lambda replica: self.anew.pop(0), lambda replica, worker: worker.setup.remote(replica))
        sglang = replace(CONFIG.rollout.sglang, max_running_requests=running)
        own = replace(
            CONFIG,
            run=replace(CONFIG.run, max_replica_restarts=most),
            rollout=replace(CONFIG.rollout, sglang=sglang, **changes),
        )
        return Rollout(own, workers, [f"h{i}" for i in range(len(workers))], embedded=False, starter=starter)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0-{i}", np.arange(i + 1), "s", "") for i in range(count)]


def submit(made: Rollout, count: int, answers: int = 2) -> None:
    made.submit(prompts(count), answers, SamplingParams(8), 5, "exact", with_texts=True)


def uids(batch: RolloutBatch) -> list[str]:
    return [info.uid for info in batch.infos]


def everything(count: int) -> list[str]:
    return [f"0-{i}/{k}" for i in range(count) for k in range(2)]


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_samples_come_in_the_order_of_their_prompts(stage: Stage, count: int) -> None:
    workers = [Worker(i) for i in range(3)]
    made = stage.rollout(workers)
    stage.first = [2] if count > 2 else []
    submit(made, count)
    batch = made.next_batch()
    assert [info.uid for info in batch.infos] == [f"0-{i}/{k}" for i in range(count) for k in range(2)]
    assert batch.groups == [[2 * i, 2 * i + 1] for i in range(count)]
    assert batch.handles == {2 * i + k: (f"ref of 0-{i}", k) for i in range(count) for k in range(2)}
    assert batch.texts == [(f"0-{i}", str(k)) for i in range(count) for k in range(2)]
    assert batch.lengths == [i + 1 + k + 1 for i in range(count) for k in range(2)]
    assert batch.num_tokens == sum(batch.lengths)
    # Shares differ by one prompt at the most, and a replica without a prompt is left alone.
    shares = [len(call) for worker in workers for call in worker.asked]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert len(shares) == len([worker for worker in workers if worker.called]) == min(count, 3)


def test_what_was_submitted_since_the_last_batch_is_the_next_one(stage: Stage) -> None:
    made = stage.rollout([Worker(0), Worker(1)])
    submit(made, 3, answers=1)
    submit(made, 1, answers=1)
    with pytest.raises(AssertionError, match="in flight"):
        made.sleep()
    assert uids(made.next_batch()) == ["0-0/0", "0-1/0", "0-2/0", "0-0/0"]
    with pytest.raises(AssertionError, match="without a batch"):
        made.next_batch()
    assert stage.asked[0] == ([Callee("SGLang replica 0", "h0")] * 2, "generation", 17)
    assert stage.asked[1][0] == [Callee("SGLang replica 1", "h1")] * 3  # two submissions and a take
    submit(made, 2, answers=1)
    assert uids(made.next_batch()) == ["0-0/0", "0-1/0"]


def test_a_job_says_all_that_a_replica_needs(stage: Stage) -> None:
    worker = Worker(0)
    made = stage.rollout([worker])
    (prompt,) = prompts(1)
    made.submit([prompt], 3, SamplingParams(8), 5, "exact", with_texts=True, with_baseline=True)
    assert worker.called == [("submit_jobs", {0: Job(prompt, 3, SamplingParams(8), 5, "exact", True, True)})]


# ------------------------------------------------------------------------------------------------ who answers what


def test_a_replica_has_as_many_answers_as_it_writes_together_and_a_little_more(stage: Stage) -> None:
    """4 together and an eighth more: below 4.5 it gets another prompt, so that it has 3 x 2 answers. With two of them
    done it has room again."""
    worker = Worker(0)
    made = stage.rollout([worker], running=4)
    worker.takes = [(100.0, ["0-1"]), (100.0, []), (100.0, ["0-0", "0-3"])]
    submit(made, 7)
    assert worker.asked == [["0-0", "0-1", "0-2"]]
    assert uids(made.next_batch()) == everything(7)
    assert worker.asked == [["0-0", "0-1", "0-2"], ["0-3"], ["0-4", "0-5"], ["0-6"]]


def test_an_answer_that_has_ended_makes_room_though_others_to_its_prompt_go_on(stage: Stage) -> None:
    """3 x 2 answers are under way, where below 4.5 there is room. When two of them have ended, though no prompt is
    whole, another prompt is sent: 4 and 2. At the next look 5 of these 8 have ended, and one more is."""
    worker = Worker(0)
    made = stage.rollout([worker], running=4)
    submit(made, 6)
    assert worker.asked == [["0-0", "0-1", "0-2"]]
    worker.takes, worker.num_ended = [(100.0, [])], 2
    made._issue_take(0, 1, 0.2)
    made._take(0)
    made._send()
    assert worker.asked[1:] == [["0-3"]]
    worker.takes, worker.num_ended = [(100.0, [])], 5
    made._issue_take(0, 1, 0.2)
    made._take(0)
    made._send()
    assert worker.asked[2:] == [["0-4"]]
    worker.num_ended = 0
    assert uids(made.next_batch()) == everything(6)


def test_the_greedy_answer_counts_among_those_that_are_written_together(stage: Stage) -> None:
    worker = Worker(0)
    made = stage.rollout([worker], running=4)
    made.submit(prompts(4), 2, SamplingParams(8), 5, "exact", with_baseline=True)
    assert worker.asked == [["0-0", "0-1"]]  # three answers each


def test_a_replica_that_has_run_out_takes_from_the_one_that_has_most_waiting(stage: Stage) -> None:
    """Prompts go round: 0 3 6 | 1 4 7 | 2 5 8. Each may have one at a time; the third is the first to be done."""
    workers = [Worker(i) for i in range(3)]
    made = stage.rollout(workers, running=1)
    stage.first = [2, 2, 2]
    submit(made, 9)
    assert [worker.asked for worker in workers] == [[["0-0"]], [["0-1"]], [["0-2"]]]
    made.wait(3)
    assert workers[2].asked == [["0-2"], ["0-5"], ["0-8"]]
    assert [len(queue) for queue in made._queues] == [2, 2, 0]
    stage.first = [2, 2]
    made.wait(1)
    assert workers[2].asked[3:] == [["0-6"]]  # the last of the first's: its cache has less use for it
    made.wait(1)
    assert workers[2].asked[4:] == [["0-7"]]
    assert uids(made.next_batch()) == everything(9)


def test_an_embedded_engine_gets_all_at_once(stage: Stage) -> None:
    worker = Worker(0)
    made = Rollout(stage.rollout([worker], running=1).config, [worker], ["h0"], embedded=True)
    submit(made, 5)
    assert worker.asked == [[f"0-{i}" for i in range(5)]]


def test_prompts_go_by_the_tokens_that_they_may_take(stage: Stage) -> None:
    """A long prompt of 40 tokens and two answers of 8 costs 56; short ones of 1 token 17 each."""
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    lengths = [40, 1, 1, 1, 1]
    made.submit(
        [Prompt(f"0-{i}", np.arange(length), "s", "") for i, length in enumerate(lengths)],
        2,
        SamplingParams(8),
        5,
        "exact",
    )
    assert [worker.asked for worker in workers] == [[["0-0"]], [["0-1", "0-2", "0-3", "0-4"]]]
    # What is under way counts: 56 against 68.
    submit(made, 1)
    assert workers[0].asked[1:] == [["0-0"]]


def test_prompts_that_begin_alike_go_to_the_same_replica(stage: Stage) -> None:
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers, routing="prefix")
    tokens = [[7, 7, 1], [3, 3, 1], [7, 7, 2], [3, 3, 2]]
    own = [Prompt(f"0-{i}", np.array(ids), "s", "") for i, ids in enumerate(tokens)]
    made.submit(own, 2, SamplingParams(8), 5, "exact")
    assert [worker.asked for worker in workers] == [[["0-1", "0-3"]], [["0-0", "0-2"]]]
    assert uids(made.next_batch()) == everything(4)


def test_a_replica_is_asked_for_all_at_once_only_where_all_are_wanted_and_nothing_waits(stage: Stage) -> None:
    """A call that waits for all of them would keep a replica from getting more, or from being stopped."""
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    submit(made, 4)
    made.wait(1)
    assert workers[0].called[-1] == ("take_groups", 1, rollout.SHORT_TAKE_SECONDS)
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    submit(made, 4)
    made.next_batch()
    assert workers[0].called[-1] == ("take_groups", 2, rollout.TAKE_SECONDS)
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers, running=3)
    stage.first = [0, 0]
    submit(made, 8)
    made.next_batch()
    # Of its own prompts none waits at the second call, but of the other's some, which it may take over.
    assert workers[0].asked[:2] == [["0-0", "0-2"], ["0-4", "0-6"]]
    assert [call[1:] for call in workers[0].called if call[0] == "take_groups"] == [
        (1, rollout.SHORT_TAKE_SECONDS),
        (1, rollout.SHORT_TAKE_SECONDS),
        (2, rollout.TAKE_SECONDS),
    ]


# ------------------------------------------------------------------------------------------------ stopping


def test_a_batch_of_those_that_were_first_stops_the_others(stage: Stage) -> None:
    """Prompts 0 and 3 end, and 5 while the others are stopped; 1, 2 and 4 were begun, those from 6 on not sent."""
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers, running=3)
    workers[0].takes = [(100.0, ["0-0"]), (100.0, [])]
    workers[1].takes = [(100.0, ["0-3"]), (100.0, [])]
    stage.first = [0, 1]
    made.submit(prompts(4), 2, SamplingParams(8), 5, "exact")
    assert [worker.asked for worker in workers] == [[["0-0", "0-2"]], [["0-1", "0-3"]]]
    made.wait(2)
    made.submit(prompts(10)[4:], 2, SamplingParams(8), 5, "exact")
    sent = {uid for worker in workers for call in worker.asked for uid in call}
    assert sent == {f"0-{i}" for i in range(6)}
    holder = next(worker for worker in workers if "0-5" in worker.asked[-1])
    holder.ends_in_stop = ["0-5"]
    assert [info.group for group in made.ended.values() for info in group.infos[:1]] == ["0-0", "0-3"]
    batch, left = made.finish([3, 0])
    assert uids(batch) == ["0-0/0", "0-0/1", "0-3/0", "0-3/1"]
    assert [job.prompt.uid for job in left] == ["0-1", "0-2", "0-4", "0-6", "0-7", "0-8", "0-9"]
    by_uid = {job.prompt.uid: job.begun for job in left}
    assert by_uid["0-1"] == (Trajectory(num_turns=2),) * 2
    assert by_uid["0-2"] == (Trajectory(num_turns=1),) * 2
    assert by_uid["0-6"] == ()
    assert [worker.called[-1] for worker in workers] == [("stop_jobs", 17)] * 2
    made.sleep()  # nothing is in flight
    assert (made.num_open, made.ended) == (0, {})
    submit(made, 2)
    assert uids(made.next_batch()) == everything(2)


def test_a_replica_that_has_nothing_is_not_stopped_and_a_call_under_way_is_waited_for(stage: Stage) -> None:
    workers = [Worker(0), Worker(1), Worker(2)]
    made = stage.rollout(workers)
    workers[0].takes = [(100.0, ["0-0"])]
    workers[1].takes = [(100.0, ["0-1"])]
    stage.first = [0]
    submit(made, 3)
    made.wait(1)
    workers[2].takes = [(100.0, [])]
    batch, left = made.finish([0])
    assert uids(batch) == ["0-0/0", "0-0/1"]
    assert [job.prompt.uid for job in left] == ["0-2"]  # the second ended in its call, and is left out
    assert [worker.calls("take_groups", "stop_jobs") for worker in workers] == [
        ["take_groups"],
        ["take_groups"],
        ["take_groups", "stop_jobs"],
    ]


def test_an_engine_that_dies_while_it_is_stopped_has_its_answers_still(stage: Stage) -> None:
    workers = [Worker(0, "killed", stop_jobs=[ENGINE_DIED]), Worker(1)]
    made = stage.rollout(workers)
    workers[0].takes = [(100.0, ["0-0"])]
    workers[1].takes = [(100.0, [])]
    submit(made, 3)
    made.wait(1)
    batch, left = made.finish([0])
    assert uids(batch) == ["0-0/0", "0-0/1"]
    assert [(job.prompt.uid, job.begun) for job in left] == [("0-1", (Trajectory(num_turns=2),) * 2), ("0-2", ())]
    made.sleep()


def test_a_process_that_dies_while_it_is_stopped_is_replaced_and_what_others_have_begun_goes_on(stage: Stage) -> None:
    workers = [Worker(0, "killed", stop_jobs=[PROCESS_DIED]), Worker(1)]
    made, stage.anew = stage.rollout(workers), [Worker(2)]
    workers[0].takes = [(100.0, ["0-0"])]
    workers[1].takes = [(100.0, [])]
    submit(made, 3)
    made.wait(1)
    with pytest.raises(ReplicaDied, match="stopping generation: SGLang replica 0 failed"):
        made.finish([0])
    made.sleep()
    made.replace(made.find_dead())
    assert (made.num_open, made.ended) == (3, {})
    made.wait(3)
    assert uids(made.finish([0, 1, 2])[0]) == everything(3)
    jobs = [call[1] for worker in made.workers for call in worker.called if call[0] == "submit_jobs"]
    begun = {number: job.begun for given in jobs for number, job in given.items() if job.begun}
    assert begun == {1: (Trajectory(num_turns=2),) * 2}


def test_a_replica_that_fails_to_stop_ends_the_run(stage: Stage) -> None:
    made = stage.rollout([Worker(0, stop_jobs=[REFUSED])])
    submit(made, 1)
    with pytest.raises(WorkerError, match="refused request 7") as raised:
        made.finish([])
    assert not isinstance(raised.value, ReplicaDied)


# ------------------------------------------------------------------------------------------------ time


def test_figures_by_hand(stage: Stage) -> None:
    """Ten answers in 10 s. The first replica is done after 5 s and idle for 5: half of the time, a quarter in the mean.
    Nine of ten answers have ended after 6 s: the tail takes 4. The cache held 1 + 2 of 4 + 8 prompt tokens."""
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    workers[0].takes, workers[0].ended = [(105.0, ["0-0"])], {"0-0": (1.0, 2.0, 3.0, 4.0, 5.0)}
    workers[1].takes = [(107.0, []), (110.0, ["0-1"])]
    workers[1].ended = {"0-1": (2.0, 3.0, 4.0, 6.0, 10.0)}
    submit(made, 2, answers=5)
    figures = made.next_batch().figures
    assert figures.idle_share == pytest.approx(0.25)
    assert figures.tail_share == pytest.approx(0.4)
    assert figures.cache_hit_rate == pytest.approx(3 / 12)
    assert figures.activity == Activity(3, 2.0, 4.0)


def test_seconds_count_from_the_first_submission_though_a_prompt_was_sent_later(stage: Stage) -> None:
    """The first replica is idle from 2 s to 6 s, when it gets another prompt that takes it 3 s, and from 9 s to the end
    at 10 s: 5 of 10 s, a quarter in the mean. The answers end after 2, 9 and 10 s; the last score is there 0.5 s after
    the last answer."""
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    workers[0].takes = [(102.0, ["0-0"]), (109.0, ["0-2"])]
    workers[0].ended = {"0-0": (2.0,), "0-2": (3.0,)}
    workers[1].takes, workers[1].ended = [(110.0, ["0-1"])], {"0-1": (10.0,)}
    stage.first = [0]
    submit(made, 2, answers=1)
    made.wait(1)
    stage.clock.now = 106.0
    made.submit(prompts(3)[2:], 1, SamplingParams(8), 5, "exact")
    stage.first = [0]
    made.wait(2)
    assert [(group.ended, group.scored) for group in made.ended.values()] == [
        ((2.0,), 2.5),
        ((9.0,), 9.5),
        ((10.0,), 10.5),
    ]
    batch, _ = made.finish([0, 1, 2])
    assert workers[0].asked == [["0-0"], ["0-2"]]
    assert batch.figures.idle_share == pytest.approx(0.25)
    assert batch.reward_seconds == pytest.approx(0.5)
    # Of the next batch nothing of this is left.
    workers[0].takes, workers[0].ended = [(112.0, ["0-0"])], {"0-0": (2.0,)}
    workers[1].takes, workers[1].ended = [(114.0, ["0-1"])], {"0-1": (4.0,)}
    submit(made, 2, answers=1)
    figures = made.next_batch().figures
    assert figures.idle_share == pytest.approx(2 / 4 / 2)


def test_the_tail_counts_from_the_first_submission_too(stage: Stage) -> None:
    """Nine answers end after 1 s; the tenth is sent after 4 s and takes 1 s: 4 of 5 s are its tail."""
    worker = Worker(0)
    made = stage.rollout([worker])
    worker.takes = [(104.0, [f"0-{i}" for i in range(9)]), (105.0, ["0-9"])]
    worker.ended = {f"0-{i}": (1.0,) for i in range(10)}
    submit(made, 9, answers=1)
    made.wait(9)
    made.submit(prompts(10)[9:], 1, SamplingParams(8), 5, "exact")
    assert made.next_batch().figures.tail_share == pytest.approx(0.8)


def test_a_replica_that_was_given_nothing_was_idle_all_the_time(stage: Stage) -> None:
    workers = [Worker(0), Worker(1)]
    made = stage.rollout(workers)
    workers[0].takes, workers[0].ended = [(104.0, ["0-0"])], {"0-0": (4.0,)}
    submit(made, 1, answers=1)
    assert made.next_batch().figures.idle_share == pytest.approx(0.5)


@pytest.mark.parametrize("is_silent", [True, False])
def test_no_progress_within_the_deadline_is_an_error_that_names_who_has_not_answered(
    stage: Stage, is_silent: bool
) -> None:
    """The second replica answers at 116 s, and nobody after it: its calls do not end, or end with nothing."""
    workers = [Worker(0), Worker(1), Worker(2)]
    made = stage.rollout(workers)
    workers[1].takes = [(116.0, ["0-1"])]
    submit(made, 3)
    stage.first = [1]
    made.wait(1)
    for worker in workers:
        worker.takes = [(120.0 + 5 * i, []) for i in range(50)]
    stage.is_silent = is_silent
    said = r"generation: no answer within 17 s from SGLang replica 0 on h0, SGLang replica 2 on h2 \(run\.deadline\)"
    with pytest.raises(WorkerError, match=said):
        made.next_batch()
    assert stage.clock.now >= 116.0 + 17.0


def test_answers_that_go_on_coming_are_waited_for_beyond_the_deadline(stage: Stage) -> None:
    worker = Worker(0)
    made = stage.rollout([worker])
    worker.takes = [(100.0 + 16 * i, [f"0-{i}"]) for i in range(5)]
    submit(made, 5)
    assert uids(made.next_batch()) == everything(5)


def test_a_living_replica_that_hangs_while_another_has_died_is_found_out(stage: Stage) -> None:
    workers = [Worker(0, "killed", take_groups=[ENGINE_DIED]), Worker(1)]
    made = stage.rollout(workers)
    workers[1].takes = [(105.0 + 5 * i, []) for i in range(50)]
    submit(made, 2)
    with pytest.raises(WorkerError, match="no answer within 17 s from SGLang replica 1 on h1") as raised:
        made.next_batch()
    assert not isinstance(raised.value, ReplicaDied)


def test_each_replica_gets_the_sockets_of_its_ranks() -> None:
    """Three replicas of two ranks."""
    workers = [Worker(i) for i in range(3)]
    made = Rollout(CONFIG, workers, ["h0", "h1", "h2"], embedded=False)
    calls = made.start_sync(4, ["s0", "s1", "s2", "s3", "s4", "s5"], 9, 7.0)
    assert [(ref.get(), callee) for ref, callee in calls] == [
        ((i, "sync"), Callee(f"SGLang replica {i}", f"h{i}")) for i in range(3)
    ]
    assert [w.called for w in workers] == [
        [("sync", 4, ["s0", "s1"], 9, 7.0)],
        [("sync", 4, ["s2", "s3"], 9, 7.0)],
        [("sync", 4, ["s4", "s5"], 9, 7.0)],
    ]


def test_an_engine_on_gpus_of_its_own_keeps_its_memory_and_forgets_old_prefixes(stage: Stage) -> None:
    own = config.build({"model": {"create": {}}, "data": {"create": {}}, "rollout": {"num_gpus": 2}})
    workers = [Worker(0), Worker(1)]
    made = Rollout(own, workers, ["h", "h"], embedded=False, gpus=[" (GPU 4)", " (GPU 5)"])
    made.sleep()
    made.wake_weights()
    made.resume()
    assert [worker.called for worker in workers] == [[("flush_cache",)]] * 2
    callees = [Callee("SGLang replica 0 (GPU 4)", "h"), Callee("SGLang replica 1 (GPU 5)", "h")]
    assert [asked[0] for asked in stage.asked] == [callees]


def test_memory_comes_and_goes_on_replicas_but_not_on_an_embedded_engine(stage: Stage) -> None:
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


@pytest.mark.parametrize("failure", [ENGINE_DIED, PROCESS_DIED], ids=["engine", "process"])
def test_what_a_dead_replica_had_not_answered_is_asked_again_of_all_and_the_rest_is_kept(
    stage: Stage, failure: Exception
) -> None:
    workers = [Worker(0), Worker(1, "killed by SIGKILL", take_groups=[failure]), Worker(2)]
    made, new = stage.rollout(workers), Worker(3)
    dead, stage.anew = workers[1], [new]
    stage.first = [1]
    submit(made, 9)
    with pytest.raises(ReplicaDied, match="generation: SGLang replica 1 failed"):
        made.next_batch()
    assert made.num_open == 3
    assert (found := made.find_dead()) == {1: "killed by SIGKILL"}
    (message,) = made.replace(found)
    assert message.startswith("SGLang replica 1 on h1 died and was replaced in 0 s (1 of run.max_replica_restarts = 3)")
    assert message.endswith("killed by SIGKILL")
    assert stage.killed == [dead]
    assert dead.calls("submit_jobs", "heartbeat", "shutdown") == ["submit_jobs", "heartbeat", "shutdown"]
    assert new.called == [("setup", 1)]
    made.sleep()  # nothing is in flight meanwhile
    assert uids(made.next_batch()) == everything(9)
    assert workers[0].asked == [["0-0", "0-3", "0-6"], ["0-1"]]
    assert new.asked == [["0-4"]]
    assert workers[2].asked == [["0-2", "0-5", "0-8"], ["0-7"]]
    assert made.find_dead() == {}


def test_what_waited_for_a_dead_replica_is_asked_of_the_others_too(stage: Stage) -> None:
    """One prompt at a time: 0 and 1 were asked, and 2 to 5 waited."""
    workers = [Worker(0), Worker(1, "killed", take_groups=[ENGINE_DIED])]
    made, stage.anew = stage.rollout(workers, running=1), [Worker(2)]
    stage.first = [1]
    submit(made, 6)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    assert (workers[0].asked, workers[1].asked) == ([["0-0"]], [["0-1"]])
    made.replace(made.find_dead())
    assert uids(made.next_batch()) == everything(6)
    asked = [uid for worker in made.workers for call in worker.asked for uid in call]
    assert sorted(asked) == [f"0-{i}" for i in range(6)]


def test_a_replica_that_dies_as_it_is_given_prompts_is_found_out(stage: Stage) -> None:
    workers = [Worker(0, "killed", submit_jobs=[ENGINE_DIED]), Worker(1)]
    made, stage.anew = stage.rollout(workers), [Worker(2)]
    submit(made, 4)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    made.replace(made.find_dead())
    assert uids(made.next_batch()) == everything(4)


def test_samples_that_lay_in_a_process_which_is_replaced_are_drawn_again(stage: Stage) -> None:
    """The second replica dies first; then the first, which had answered."""
    workers = [Worker(0, take_groups=[None, ENGINE_DIED]), Worker(1, "killed", take_groups=[PROCESS_DIED])]
    made, stage.anew = stage.rollout(workers), [Worker(2), Worker(3)]
    submit(made, 4)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    made.replace(made.find_dead())
    with pytest.raises(ReplicaDied):
        made.next_batch()
    workers[0].why = "killed too"
    made.replace(made.find_dead())
    assert made.num_open == 3
    assert uids(made.next_batch()) == everything(4)
    # The third had answered prompt 3; 1 was lost with the first, 0 and 2 as its samples were.
    assert made.workers[1].asked[0] == ["0-3"]
    again = [uid for worker in made.workers for call in worker.asked for uid in call]
    assert sorted(again) == ["0-0", "0-1", "0-2", "0-3"]


def test_several_submissions_are_kept_when_a_replica_dies(stage: Stage) -> None:
    workers = [Worker(0), Worker(1, "killed", take_groups=[ENGINE_DIED])]
    made, stage.anew = stage.rollout(workers), [Worker(2)]
    submit(made, 4)
    submit(made, 2)
    with pytest.raises(ReplicaDied):
        made.next_batch()
    made.replace(made.find_dead())
    assert uids(made.next_batch()) == [*everything(4), *everything(2)]


def test_a_failure_of_a_living_replica_is_raised_at_once_and_as_it_is(stage: Stage) -> None:
    made = stage.rollout([Worker(0, take_groups=[REFUSED]), Worker(1)])
    submit(made, 4)
    with pytest.raises(WorkerError, match="refused request 7") as raised:
        made.next_batch()
    assert not isinstance(raised.value, ReplicaDied)
    assert len(stage.asked) == 1  # the others may go on for long


def test_more_deaths_than_allowed_are_an_error_with_all_reasons(stage: Stage) -> None:
    workers = [Worker(0, "out of memory"), Worker(1)]
    made, stage.anew = stage.rollout(workers, most=1), [Worker(2)]
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
    made = stage.rollout([Worker(0), Worker(1, "busy")])
    assert made.find_dead(patience=3.0) == {}
    assert list(made.find_dead()) == [1]


def test_the_process_of_a_dead_replica_says_where_its_log_ends(stage: Stage, tmp_path: Path) -> None:
    log = tmp_path / "sglang_0.log"
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    made = stage.rollout([Worker(0, heartbeat=[PROCESS_DIED])])
    made._starter = replace(made._starter, logs=[str(log)])
    assert made.find_dead()[0].splitlines() == [
        "its process died",
        f"--- the end of {log}:",
        *(f"line {i}" for i in range(12, 20)),
    ]


def test_sleep_passes_over_a_dead_engine_but_not_over_lost_answers(stage: Stage) -> None:
    workers = [Worker(0, sleep=[ENGINE_DIED, ENGINE_DIED]), Worker(1)]
    stage.rollout(workers).sleep()
    assert workers[1].called[-1] == ("sleep",)
    with pytest.raises(WorkerError, match="engine sleep: SGLang replica 0 failed"):
        stage.rollout([Worker(0, sleep=[PROCESS_DIED] * 2), Worker(1)]).sleep()
