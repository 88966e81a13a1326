"""From generated tokens to scored samples: what every process that hosts an engine does with its answers."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from megarl.config import RewardConfig
from megarl.rewards import RewardPool, Scored
from megarl.types import GenerationRequest, GenerationResult, Prompt, Sample, SampleInfo, SamplingParams


@dataclass(frozen=True)
class Job:
    """Answers wanted to one prompt, and how to draw them."""

    prompt: Prompt
    num_answers: int
    sampling: SamplingParams
    seed: int
    reward: str
    """The reward function's name."""

    def requests(self) -> list[GenerationRequest]:
        return [
            GenerationRequest(uid, self.prompt.token_ids, self.sampling, request_seed(self.seed, uid))
            for uid in (f"{self.prompt.uid}/{k}" for k in range(self.num_answers))
        ]


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, as the driver knows them: scalars, a reference to the samples, and texts where asked
    for."""

    infos: tuple[SampleInfo, ...]
    samples: Any
    """Reference to a list[Sample] in the object store."""
    texts: tuple[tuple[str, str], ...] = ()
    """(prompt, answer) of each sample, for logs."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """From the start of the call that it came with until its last answer had ended, and until its last score was
    there."""


def request_seed(seed: int, uid: str) -> int:
    """A seed of 63 bits that depends on the run's seed and the answer's name alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest(), "little") >> 1


PendingScore = Future[tuple[float, str | None]] | Scored
"""Gives an answer's score and why the reward failed, if it did."""


class Scorer:
    """Scores answers by verifiable rewards, each as it ends, in the processes of a pool."""

    def __init__(self, tokenizer: Any, reward: RewardConfig) -> None:
        self.tokenizer = tokenizer
        functions = (reward.function, reward.validation_function)
        self._pool = RewardPool(functions, reward.num_workers, reward.time_limit, reward.memory_mb)

    def score(self, job: Job, result: GenerationResult) -> PendingScore:
        """Start scoring an answer."""
        prompt = job.prompt
        text = self.tokenizer.decode(result.response_ids, skip_special_tokens=True)
        return self._pool.submit(job.reward, (prompt.data_source, text, prompt.ground_truth, prompt.extra_info))

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()


class Answers:
    """The answers to jobs: scored as each ends, put into the object store prompt by prompt."""

    def __init__(self, scorer: Scorer, jobs: Sequence[Job], with_texts: bool) -> None:
        self._scorer, self._jobs, self._with_texts = scorer, jobs, with_texts
        by_job = [job.requests() for job in jobs]
        self.requests = [request for requests in by_job for request in requests]
        self._places = {r.uid: (number, k) for number, requests in enumerate(by_job) for k, r in enumerate(requests)}
        self._ended: list[dict[int, tuple[GenerationResult, PendingScore]]] = [{} for _ in jobs]
        self._unscored: deque[int] = deque()
        """Jobs whose answers have ended, in that order."""
        self._groups: dict[int, Group] = {}
        self._start = time.perf_counter()

    def groups(self, ended: float) -> list[Group]:
        """The jobs' groups, in their order, when all are scored. ended: time.perf_counter() at the last answer's
        end."""
        assert len(self._unscored) + len(self._groups) == len(self._jobs), "the engine left requests unanswered"
        while self._unscored:
            self._finish(self._unscored.popleft())
        seconds = (ended - self._start, time.perf_counter() - self._start)
        return [replace(self._groups[number], seconds=seconds) for number in range(len(self._jobs))]

    def take(self, result: GenerationResult) -> None:
        """Start scoring an answer; they come in any order."""
        number, k = self._places[result.uid]
        own = self._ended[number]
        own[k] = (result, self._scorer.score(self._jobs[number], result))
        if len(own) == self._jobs[number].num_answers:
            self._unscored.append(number)
        while self._unscored and all(score.done() for _, score in self._ended[self._unscored[0]].values()):
            self._finish(self._unscored.popleft())

    def _finish(self, number: int) -> None:
        job, own = self._jobs[number], self._ended[number]
        samples = [_sample(job, result, *score.result()) for _, (result, score) in sorted(own.items())]
        texts: tuple[tuple[str, str], ...] = ()
        if self._with_texts:
            decode = self._scorer.tokenizer.decode
            texts = tuple((decode(s.prompt_ids), decode(s.response_ids)) for s in samples)
        self._groups[number] = Group(tuple(SampleInfo.of(s) for s in samples), ray.put(samples), texts)


def _sample(job: Job, result: GenerationResult, score: float, error: str | None) -> Sample:
    length = len(result.response_ids)
    return Sample(
        uid=result.uid,
        group=job.prompt.uid,
        prompt_ids=job.prompt.token_ids,
        response_ids=result.response_ids,
        rollout_logprobs=result.logprobs,
        loss_mask=np.ones(length, np.bool_),
        weight_versions=np.full(length, result.weight_version, np.int64),
        score=score,
        finish_reason=result.finish_reason,
        data_source=job.prompt.data_source,
        reward_error=error,
    )


def generate_jobs(engine: Any, scorer: Scorer, jobs: Sequence[Job], with_texts: bool = False) -> list[Group]:
    """Answer all jobs with an engine that takes a whole list of requests at once."""
    answers = Answers(scorer, jobs, with_texts)
    results = engine.generate(answers.requests)
    ended = time.perf_counter()
    for result in results:
        answers.take(result)
    return answers.groups(ended)


def stream_jobs(engine: Any, scorer: Scorer, jobs: Sequence[Job], with_texts: bool = False) -> list[Group]:
    """Answer all jobs, all in flight at once, with an engine that gives each answer as it ends."""
    answers = Answers(scorer, jobs, with_texts)
    for result in engine.stream(answers.requests):
        answers.take(result)
    return answers.groups(time.perf_counter())
