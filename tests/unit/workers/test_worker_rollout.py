"""A replica's process: answers and scores end in any order, and each goes to its prompt."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.types import Activity, GenerationRequest, GenerationResult, Prompt, SamplingParams
from megarl.workers import generation
from megarl.workers.generation import Generation, Job
from megarl.workers.rollout import RolloutWorker


class Engine:
    """Answers in threads of its own, in an order drawn by the seed; after `until` of them it says nothing more. What
    is asked for is all aborted by a stop."""

    answers_at_once = False

    def __init__(self, seed: int, until: int | None = None) -> None:
        self.seed, self.until = seed, until
        self.left: list[GenerationRequest] = []

    def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
        order, self.put = random.Random(self.seed).sample(requests, len(requests)), put
        self.left = order[len(order) if self.until is None else self.until :]

        def answer() -> None:
            for request in order[: self.until]:
                put(result(request, "stop"))

        threading.Thread(target=answer).start()

    def abort_all(self) -> None:
        left, self.left = self.left, []
        for request in left:
            self.put(result(request, "abort"))

    def check(self) -> None:
        pass

    def activity(self) -> Activity:
        return Activity(2, 1.0)


def result(request: GenerationRequest, reason: Any) -> GenerationResult:
    return GenerationResult(request.uid, np.array([int(request.uid[-1])]), np.zeros(1, np.float32), reason, 0)


class Scorer:
    """An answer's score is its number; scores are there in an order drawn by the seed, some after all answers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(token_ids[0])

    def score(self, job: Job, answer: str) -> Future[tuple[float, None]]:
        future: Future[tuple[float, None]] = Future()
        threading.Timer(self.random.random() / 20, future.set_result, ((float(answer), None),)).start()
        return future


def worker(engine: Engine) -> RolloutWorker:
    made = RolloutWorker()
    made.generation = Generation(engine, Scorer(engine.seed))  # type: ignore[arg-type]
    return made


JOBS = {
    7 - i: Job(Prompt(f"0-{i}", np.array([1]), "s", ""), 1 + i % 3, SamplingParams(4), 1, "exact") for i in range(5)
}


@pytest.fixture(autouse=True)
def _put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store is not there: a reference is the thing itself."""
    monkeypatch.setattr(generation.ray, "put", lambda value: value)


@pytest.mark.parametrize("seed", range(5))
def test_groups_have_their_jobs_numbers_and_answers_their_order_whatever_ends_first(seed: int) -> None:
    made = worker(Engine(seed))
    made.submit_jobs(JOBS)
    taken = made.take_groups(5, 60.0)
    assert all(info.score == float(info.uid[-1]) for group in taken.groups.values() for info in group.infos)
    found = {number: [info.uid for info in group.infos] for number, group in taken.groups.items()}
    assert found == {number: [sample.uid for sample in group.samples] for number, group in taken.groups.items()}
    assert found == {7 - i: [f"0-{i}/{k}" for k in range(1 + i % 3)] for i in range(5)}
    assert taken.activity == Activity(2, 1.0)


def test_what_is_not_answered_comes_back_from_a_stop() -> None:
    """Of the nine answers eight end."""
    made = worker(Engine(1, until=8))
    made.submit_jobs(JOBS)
    groups = made.take_groups(4, 60.0).groups
    stopped = made.stop_jobs(60.0)
    (number,) = stopped.jobs
    assert {number, *groups, *stopped.groups} == set(JOBS)
    begun = stopped.jobs[number].begun
    assert len(begun) == JOBS[number].num_answers
    assert [trajectory.finish_reason for trajectory in begun].count(None) == 1


def test_the_heartbeat_says_why_a_replica_does_not_run() -> None:
    made = RolloutWorker()
    assert made.heartbeat() == "it did not start"
    made.engine = SimpleNamespace(why_dead=lambda: None)  # type: ignore[assignment]
    assert made.heartbeat() is None
    made.engine = SimpleNamespace(why_dead=lambda: "SGLang has died")  # type: ignore[assignment]
    assert made.heartbeat() == "SGLang has died"
