"""A replica's process: answers end in any order and come back in that of their prompts."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.types import GenerationRequest, GenerationResult, Prompt, SamplingParams
from megarl.workers import generation
from megarl.workers.generation import Job
from megarl.workers.rollout import RolloutWorker


class Engine:
    """Answers end in an order drawn by the seed; after `until` of them it stops."""

    def __init__(self, seed: int, until: int | None = None) -> None:
        self.seed, self.until = seed, until

    def stream(self, requests: list[GenerationRequest]) -> Iterator[GenerationResult]:
        for request in random.Random(self.seed).sample(requests, len(requests))[: self.until]:
            yield GenerationResult(request.uid, np.zeros(1, np.int64), np.zeros(1, np.float32), "stop", 0)


class Scorer:
    """An answer's score is its number; scores are there in an order drawn by the seed, some after all answers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def score(self, job: Job, result: GenerationResult) -> Future[tuple[float, None]]:
        future: Future[tuple[float, None]] = Future()
        threading.Timer(self.random.random() / 20, future.set_result, ((float(result.uid[-1]), None),)).start()
        return future


def worker(engine: Engine) -> RolloutWorker:
    made = RolloutWorker()
    made.engine, made.scorer = engine, Scorer(engine.seed)  # type: ignore[assignment]
    return made


JOBS = [Job(Prompt(f"0-{i}", np.array([1]), "s", ""), 1 + i % 3, SamplingParams(4), 1, "exact") for i in range(5)]


@pytest.fixture(autouse=True)
def _put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store is not there: a reference is the thing itself."""
    monkeypatch.setattr(generation.ray, "put", lambda value: value)


@pytest.mark.parametrize("seed", range(5))
def test_groups_come_in_the_order_of_jobs_whatever_ends_first(seed: int) -> None:
    groups = worker(Engine(seed)).generate(JOBS, with_texts=False)
    assert all(info.score == float(info.uid[-1]) for group in groups for info in group.infos)
    found = [[info.uid for info in group.infos] for group in groups]
    assert found == [[sample.uid for sample in group.samples] for group in groups]
    assert found == [[f"0-{i}/{k}" for k in range(1 + i % 3)] for i in range(5)]


def test_an_engine_that_leaves_requests_unanswered_is_found_out() -> None:
    with pytest.raises(AssertionError, match="unanswered"):
        worker(Engine(1, until=8)).generate(JOBS, with_texts=False)


def test_the_heartbeat_says_why_a_replica_does_not_run() -> None:
    made = RolloutWorker()
    assert made.heartbeat() == "it did not start"
    made.engine = SimpleNamespace(why_dead=lambda: None)  # type: ignore[assignment]
    assert made.heartbeat() is None
    made.engine = SimpleNamespace(why_dead=lambda: "SGLang has died")  # type: ignore[assignment]
    assert made.heartbeat() == "SGLang has died"
