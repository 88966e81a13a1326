"""A replica's process: answers end in any order and come back in that of their prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megarl.types import GenerationRequest, GenerationResult, Prompt, SamplingParams
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
    """A group is the names of its answers."""

    def group(self, job: Job, results: list[GenerationResult], with_texts: bool) -> Any:
        return [result.uid for result in results]


def worker(engine: Engine) -> RolloutWorker:
    made = RolloutWorker()
    made.engine, made.scorer = engine, Scorer()  # type: ignore[assignment]
    return made


JOBS = [Job(Prompt(f"0-{i}", np.array([1]), "s", ""), 1 + i % 3, SamplingParams(4), 1, "exact") for i in range(5)]


@pytest.mark.parametrize("seed", range(5))
def test_groups_come_in_the_order_of_jobs_whatever_ends_first(seed: int) -> None:
    found = worker(Engine(seed)).generate(JOBS, with_texts=False)
    assert found == [[f"0-{i}/{k}" for k in range(1 + i % 3)] for i in range(5)]


def test_an_engine_that_leaves_requests_unanswered_is_found_out() -> None:
    with pytest.raises(AssertionError, match="unanswered"):
        worker(Engine(1, until=8)).generate(JOBS, with_texts=False)
