"""From generated tokens to scored samples; seeds that depend on the answer's name alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import RewardConfig
from megarl.types import GenerationRequest, GenerationResult, Prompt, SamplingParams
from megarl.workers import generation
from megarl.workers.generation import Job, Scorer, generate_jobs, request_seed, stream_jobs

SAMPLING = SamplingParams(8, 1.0)


def job(uid: str, answers: int, truth: str = "12", reward: str = "exact") -> Job:
    return Job(Prompt(uid, np.array([1, 2]), "s", truth), answers, SAMPLING, 5, reward)


class Tokenizer:
    """A token is its digit; 0 is special."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(str(t) for t in tokens if t or not skip_special_tokens)


class Engine:
    """Answer k to a prompt is `1 k 0`."""

    def generate(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        self.requests = requests
        return [
            GenerationResult(r.uid, np.array([1, int(r.uid[-1]), 0]), np.array([-1, -2, -3], np.float32), "stop", 4)
            for r in requests
        ]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store is not there: a reference is the thing itself."""
    monkeypatch.setattr(generation.ray, "put", lambda value: value)


def test_seeds_are_stable_and_differ_by_answer_and_by_run() -> None:
    """The literal was computed with Python's hashlib: BLAKE2b of "1/0-17/0", 8 bytes, little-endian, halved."""
    assert request_seed(1, "0-17/0") == 8199485367276455475
    seeds = {request_seed(seed, f"0-{row}/{k}") for seed in (1, 2) for row in range(50) for k in range(20)}
    assert len(seeds) == 2 * 50 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_job_asks_for_each_answer_by_name() -> None:
    first, second = job("0-3", 2).requests()
    assert (first.uid, second.uid) == ("0-3/0", "0-3/1")
    assert (first.seed, second.seed) == (request_seed(5, "0-3/0"), request_seed(5, "0-3/1"))
    assert first.sampling == SAMPLING


@pytest.mark.usefixtures("put")
def test_answers_go_to_their_prompts_and_are_scored() -> None:
    engine = Engine()
    scorer = Scorer(Tokenizer(), RewardConfig("exact"))
    groups = generate_jobs(engine, scorer, [job("0-1", 3), job("0-2", 1, truth="1")], with_texts=True)
    assert [r.uid for r in engine.requests] == ["0-1/0", "0-1/1", "0-1/2", "0-2/0"]
    assert [[(i.uid, i.group, i.score) for i in g.infos] for g in groups] == [
        [("0-1/0", "0-1", 0.0), ("0-1/1", "0-1", 0.0), ("0-1/2", "0-1", 1.0)],
        [("0-2/0", "0-2", 1.0)],
    ]
    assert groups[0].texts == (("12", "100"), ("12", "110"), ("12", "120"))
    sample = groups[0].samples[2]
    assert sample.response_ids.tolist() == [1, 2, 0]
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (sample.loss_mask.tolist(), sample.weight_versions.tolist()) == ([True] * 3, [4] * 3)
    assert groups[1].infos[0].min_weight_version == 4


USERS = """
import time
def score(data_source, response, ground_truth, extra_info):
    if response == "12":
        raise KeyError("answer")
    if response == "11":
        time.sleep(60)
    return float(response)
"""


@pytest.mark.usefixtures("put")
def test_a_users_reward_that_fails_is_a_score_of_0_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_reward.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    name = "users_reward:score"
    scorer = Scorer(Tokenizer(), RewardConfig(name, num_workers=2, time_limit=0.5))
    try:
        groups = generate_jobs(Engine(), scorer, [job("0-1", 3, reward=name), job("0-2", 1, reward=name)])
    finally:
        scorer.close()
    assert "users_reward" not in sys.modules
    assert [[i.score for i in group.infos] for group in groups] == [[1.0, 0.0, 0.0], [1.0]]
    first, second, third = groups[0].infos
    assert first.reward_error is None
    assert second.reward_error == "reward timed out after 0.5 s"
    assert third.reward_error == "KeyError: 'answer' (users_reward.py:5)"
    for group in groups:
        generated, scored = group.seconds
        assert generated < 0.4
        assert scored >= 0.5
    assert (groups[0].texts, groups[0].samples[1].reward_error) == ((), second.reward_error)


class Streaming:
    """Gives the answers one by one; before the second it waits until the first is scored."""

    def __init__(self, scorer: Recording) -> None:
        self.scorer = scorer

    def stream(self, requests: list[GenerationRequest]) -> Iterator[GenerationResult]:
        for index, result in enumerate(Engine().generate(requests)):
            if index:
                assert self.scorer.futures[index - 1].result(timeout=30) == (1.0, None)
            yield result


class Recording(Scorer):
    def score(self, job: Job, result: GenerationResult) -> Any:
        self.futures = [*getattr(self, "futures", []), super().score(job, result)]
        return self.futures[-1]


@pytest.mark.usefixtures("put")
def test_an_answer_is_scored_before_the_next_one_of_its_prompt_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_reward.py").write_text("def score(*_): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "users_reward:score"
    scorer = Recording(Tokenizer(), RewardConfig(name, num_workers=1))
    try:
        (group,) = stream_jobs(Streaming(scorer), scorer, [job("0-1", 3, reward=name)])
    finally:
        scorer.close()
    assert [i.score for i in group.infos] == [1.0] * 3
