"""From generated tokens to scored samples: what every process that hosts an engine does with its answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from megarl.rewards import RewardFunction, load_reward, score_safely
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


def request_seed(seed: int, uid: str) -> int:
    """A seed of 63 bits that depends on the run's seed and the answer's name alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest(), "little") >> 1


class Scorer:
    """Scores answers by verifiable rewards."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._rewards: dict[str, RewardFunction] = {}

    def group(self, job: Job, results: Sequence[GenerationResult], with_texts: bool = False) -> Group:
        """Score the answers to one prompt and put them into the object store."""
        samples = [self._sample(job, result) for result in results]
        texts: tuple[tuple[str, str], ...] = ()
        if with_texts:
            texts = tuple((self.tokenizer.decode(s.prompt_ids), self.tokenizer.decode(s.response_ids)) for s in samples)
        return Group(tuple(SampleInfo.of(s) for s in samples), ray.put(samples), texts)

    def _sample(self, job: Job, result: GenerationResult) -> Sample:
        prompt = job.prompt
        if job.reward not in self._rewards:
            self._rewards[job.reward] = load_reward(job.reward)
        text = self.tokenizer.decode(result.response_ids, skip_special_tokens=True)
        score, error = score_safely(
            self._rewards[job.reward], prompt.data_source, text, prompt.ground_truth, dict(prompt.extra_info)
        )
        length = len(result.response_ids)
        return Sample(
            uid=result.uid,
            group=prompt.uid,
            prompt_ids=prompt.token_ids,
            response_ids=result.response_ids,
            rollout_logprobs=result.logprobs,
            loss_mask=np.ones(length, np.bool_),
            weight_versions=np.full(length, result.weight_version, np.int64),
            score=score,
            finish_reason=result.finish_reason,
            data_source=prompt.data_source,
            reward_error=error,
        )


def generate_jobs(engine: Any, scorer: Scorer, jobs: Sequence[Job], with_texts: bool = False) -> list[Group]:
    """Answer all jobs with an engine that takes a whole list of requests at once."""
    requests = [job.requests() for job in jobs]
    results = engine.generate([r for group in requests for r in group])
    groups, start = [], 0
    for job, wanted in zip(jobs, requests, strict=True):
        groups.append(scorer.group(job, results[start : start + len(wanted)], with_texts))
        start += len(wanted)
    return groups
