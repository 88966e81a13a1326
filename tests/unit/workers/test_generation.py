"""From prompts to scored samples: what is asked, scored, stopped and taken up again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.config import RewardConfig
from megarl.environments import Step
from megarl.types import Activity, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from megarl.workers import generation
from megarl.workers.generation import (
    Generation,
    Group,
    Job,
    Scorer,
    Shaping,
    Surroundings,
    Trajectory,
    request_seed,
)

SAMPLING = SamplingParams(8, 1.0, stop_token_ids=(0,))


def job(uid: str, answers: int, truth: str = "12", reward: str = "exact", **changes: Any) -> Job:
    return Job(Prompt(uid, np.array([1, 2]), "s", truth), answers, SAMPLING, 5, reward, **changes)


class Tokenizer:
    """A token is its digit; 0 is special, and ends a turn."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(str(t) for t in tokens if t or not skip_special_tokens)


Rule = Callable[[tuple[int, ...]], int]
"""The next token, of all before it."""


class Engine:
    """Writes a token a step for each request in flight, by a rule of all the tokens before it. The log-prob of a token
    is -(its position + 1)."""

    answers_at_once = False

    def __init__(self, rule: Rule, version: int = 4) -> None:
        self.rule, self.version = rule, version
        self.flying: dict[str, tuple[GenerationRequest, list[int], Callable[..., None]]] = {}
        self.requests: list[GenerationRequest] = []
        self.starts: list[list[str]] = []
        self.is_dead, self.aborts, self.deaf_to = False, 0, 0

    def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
        self.starts.append([request.uid for request in requests])
        for request in requests:
            assert request.uid not in self.flying, "asked twice"
            assert request.sampling.max_new_tokens > 0
            self.requests.append(request)
            self.flying[request.uid] = (request, [], put)

    def step(self, uids: Sequence[str] | None = None) -> None:
        """One token more of each, or of some."""
        for uid in list(self.flying) if uids is None else uids:
            request, tokens, _ = self.flying[uid]
            tokens.append(self.rule((*map(int, request.prompt_ids), *tokens)))
            if tokens[-1] in request.sampling.stop_token_ids:
                self.end(uid, "stop")
            elif len(tokens) == request.sampling.max_new_tokens:
                self.end(uid, "length")

    def end(self, uid: str, reason: Any) -> None:
        request, tokens, put = self.flying.pop(uid)
        start = len(request.prompt_ids)
        logprobs = -np.arange(start + 1, start + 1 + len(tokens), dtype=np.float32)
        put(GenerationResult(uid, np.array(tokens, np.int64), logprobs, reason, self.version, cached_tokens=1))

    def abort_all(self) -> None:
        self.aborts += 1
        if self.aborts > self.deaf_to:
            for uid in list(self.flying):
                self.end(uid, "abort")

    def check(self) -> None:
        if self.is_dead:
            raise RuntimeError("SGLang has died")

    def activity(self) -> Activity:
        return Activity(1, 3.0, 5.0)


class Numbered(Engine):
    """Answer k to a prompt is `1 k 0`; they end in the call."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 0)

    def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
        self.requests += requests
        for request in requests:
            tokens = np.array([1, int(request.uid[-1]), 0])
            put(GenerationResult(request.uid, tokens, np.array([-1, -2, -3], np.float32), "stop", 4, cached_tokens=1))


class Pending:
    """A scorer or an environment of which the test says when it answers: `now` is at once."""

    def __init__(self, now: bool = True) -> None:
        self.now = now
        self.waiting: list[tuple[Future[Any], Any]] = []
        self.closed = 0

    def give(self, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.now:
            future.set_result(value)
        else:
            self.waiting.append((future, value))
        return future

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, value in waiting:
            future.set_result(value)

    def close(self) -> None:
        self.closed += 1


class DigitSum(Pending):
    """Scores an answer by the sum of its digits."""

    def __init__(self, now: bool = True) -> None:
        super().__init__(now)
        self.tokenizer, self.texts = Tokenizer(), list[str]()

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def score(self, job: Job, answer: str) -> Any:
        self.texts.append(answer)
        return self.give((float(sum(map(int, answer))), None))


class Echo(Pending):
    """Says 7 and the last digit of each turn; each turn is worth `reward`. Done after `turns`; `broken` turns fail."""

    def __init__(self, turns: int, reward: float | None = None, now: bool = True, broken: int = 0) -> None:
        super().__init__(now)
        self.turns, self.reward, self.broken = turns, reward, broken
        self.heard: list[str] = []
        self.num_resets = 0

    def reset(self, prompt: Prompt) -> Any:
        self.num_resets += 1
        return self.give((None, "KeyError: 'x'") if self.broken == -1 else ({"turn": 0}, None))

    def step(self, state: Any, text: str) -> Any:
        self.heard.append(text)
        turn = state["turn"] + 1
        if turn == self.broken:
            return self.give((None, "environment timed out after 10 s"))
        done = turn == self.turns
        return self.give((Step({"turn": turn}, text[-1:], self.reward, done, "user"), None))


def observation_tokens(role: str, text: str, max_tokens: int) -> Any:
    assert role == "user"
    return np.array([7, *map(int, text)][:max_tokens], np.int64)


def around(echo: Echo, max_turns: int = 9, max_observation_tokens: int = 2) -> Surroundings:
    return Surroundings(echo, observation_tokens, max_turns, max_observation_tokens)  # type: ignore[arg-type]


def made(engine: Engine, scorer: Any = None, surroundings: Surroundings | None = None) -> Generation:
    return Generation(engine, scorer or DigitSum(), surroundings)


@pytest.fixture(autouse=True)
def _put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store is not there: a reference is the thing itself."""
    monkeypatch.setattr(generation.ray, "put", lambda value: value)


def finished(own: Generation, engine: Engine, count: int = 1, *pending: Pending) -> dict[int, Group]:
    """Groups, when so many have ended: everyone works until then."""
    groups: dict[int, Group] = {}
    for _ in range(200):
        groups |= own.take(0, 0.0).groups
        if len(groups) == count:
            return groups
        engine.step()
        for one in pending:
            one.answer()
    raise AssertionError(f"{len(groups)} of {count} groups ended")


def samples(group: Group) -> list[Sample]:
    found: list[Sample] = group.samples
    return found


# ------------------------------------------------------------------------------------------------ what is asked


def test_seeds_are_stable_and_differ_by_answer_and_by_run() -> None:
    """The literal was computed with Python's hashlib: BLAKE2b of "1/0-17/0", 8 bytes, little-endian, halved."""
    assert request_seed(1, "0-17/0") == 8199485367276455475
    seeds = {request_seed(seed, f"0-{row}/{k}") for seed in (1, 2) for row in range(50) for k in range(20)}
    assert len(seeds) == 2 * 50 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_job_asks_for_each_answer_by_name() -> None:
    own = job("0-3", 2)
    first, second = (own.request(k, Trajectory()) for k in range(2))
    assert (first.uid, second.uid) == ("0-3/0", "0-3/1")
    assert (first.seed, second.seed) == (request_seed(5, "0-3/0"), request_seed(5, "0-3/1"))
    assert first.sampling == SAMPLING
    assert first.prompt_ids.tolist() == [1, 2]


def test_the_rest_of_an_answer_is_asked_for_behind_its_tokens_with_a_seed_of_its_own() -> None:
    own = job("0-3", 2)
    begun = Trajectory().with_result(
        GenerationResult("0-3/1", np.array([5, 6, 7]), np.zeros(3, np.float32), "abort", 4)
    )
    request = own.request(1, begun)
    assert request.uid == "0-3/1+3"
    assert request.prompt_ids.tolist() == [1, 2, 5, 6, 7]
    assert request.sampling == replace(SAMPLING, max_new_tokens=5)
    assert request.seed == request_seed(5, "0-3/1+3") != request_seed(5, "0-3/1")


def test_the_baseline_is_greedy_and_no_sample() -> None:
    """Two answers that are drawn, 1 0 0 and 1 1 0, and a greedy one, 9 0, whose digits sum to 9."""

    class WithBaseline(Numbered):
        def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
            super().start([r for r in requests if not r.uid.endswith("baseline")], put)
            for request in requests:
                if request.uid.endswith("baseline"):
                    self.requests.append(request)
                    put(GenerationResult(request.uid, np.array([9, 0]), np.zeros(2, np.float32), "stop", 4))

    engine = WithBaseline()
    own = made(engine)
    narrow = replace(SAMPLING, temperature=0.7, top_p=0.5, top_k=3)
    own.submit({3: replace(job("0-1", 2, with_baseline=True), sampling=narrow)})
    (group,) = own.take(1, 0.0).groups.values()
    assert [(i.uid, i.score, i.baseline) for i in group.infos] == [("0-1/0", 1.0, 9.0), ("0-1/1", 2.0, 9.0)]
    assert [sample.uid for sample in samples(group)] == ["0-1/0", "0-1/1"]
    assert [request.uid for request in engine.requests] == ["0-1/0", "0-1/1", "0-1/baseline"]
    assert engine.requests[0].sampling == narrow
    assert engine.requests[2].sampling == SamplingParams(8, 0.0, 1.0, -1, (0,))
    own.submit({4: job("0-1", 2)})
    (group,) = own.take(1, 0.0).groups.values()
    assert [info.baseline for info in group.infos] == [None, None]


# ------------------------------------------------------------------------------------------------ answers and scores


def test_samples_carry_what_their_prompt_says() -> None:
    content = [{"role": "user", "content": "12"}]
    asked = replace(job("0-1", 2), prompt=replace(job("0-1", 2).prompt, content=content))
    own = made(Numbered(), Scorer(Tokenizer(), RewardConfig("exact")))
    own.submit({0: asked, 1: job("0-2", 1)})
    groups = own.take(2, 0.0).groups
    assert [sample.prompt_content for sample in samples(groups[0])] == [content, content]
    assert [sample.prompt_content for sample in samples(groups[1])] == [""]


def test_answers_go_to_their_prompts_and_are_scored() -> None:
    engine = Numbered()
    own = made(engine, Scorer(Tokenizer(), RewardConfig("exact")))
    own.submit({7: job("0-1", 3, with_texts=True), 4: job("0-2", 1, truth="1")})
    taken = own.take(2, 0.0)
    assert [r.uid for r in engine.requests] == ["0-1/0", "0-1/1", "0-1/2", "0-2/0"]
    assert {number: [(i.uid, i.group, i.score) for i in g.infos] for number, g in taken.groups.items()} == {
        7: [("0-1/0", "0-1", 0.0), ("0-1/1", "0-1", 0.0), ("0-1/2", "0-1", 1.0)],
        4: [("0-2/0", "0-2", 1.0)],
    }
    first, second = taken.groups[7], taken.groups[4]
    assert (first.texts, second.texts) == ((("12", "100"), ("12", "110"), ("12", "120")), ())
    sample = samples(first)[2]
    assert sample.response_ids.tolist() == [1, 2, 0]
    assert sample.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (sample.loss_mask.tolist(), sample.weight_versions.tolist()) == ([True] * 3, [4] * 3)
    assert (sample.response_ids.dtype, sample.rollout_logprobs.dtype) == (np.int64, np.float32)
    assert second.infos[0].min_weight_version == 4
    # Three requests of two prompt tokens, of which the cache had one each.
    assert (first.num_prompt_tokens, first.num_cached, len(first.ended)) == (6, 3, 3)
    assert max(first.ended) <= first.scored
    assert taken.activity == Activity(1, 3.0, 5.0)


USERS = """
import time
def score(data_source, response, ground_truth, extra_info):
    if response == "12":
        raise KeyError("answer")
    if response == "11":
        time.sleep(60)
    return float(response)
"""


def test_a_users_reward_that_fails_is_a_score_of_0_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_reward.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    name = "users_reward:score"
    own = made(Numbered(), Scorer(Tokenizer(), RewardConfig(name, num_workers=2, time_limit=0.5)))
    try:
        own.submit({0: job("0-1", 3, reward=name), 1: job("0-2", 1, reward=name)})
        groups = own.take(2, 60.0).groups
    finally:
        own.close()
    assert "users_reward" not in sys.modules
    assert [[i.score for i in groups[number].infos] for number in (0, 1)] == [[1.0, 0.0, 0.0], [1.0]]
    first, second, third = groups[0].infos
    assert first.reward_error is None
    assert second.reward_error == "reward timed out after 0.5 s"
    assert third.reward_error == "KeyError: 'answer' (users_reward.py:5)"
    assert groups[0].scored - max(groups[0].ended) >= 0.4  # which the step waited for the score
    assert (groups[0].texts, samples(groups[0])[1].reward_error) == ((), second.reward_error)


def test_answers_are_scored_while_others_are_written() -> None:
    engine, scorer = Engine(lambda tokens: 0 if len(tokens) > 2 else 5), DigitSum()
    own = made(engine, scorer)
    own.submit({0: job("0-1", 3)})
    engine.step(["0-1/1"])
    engine.step(["0-1/1"])
    assert own.take(1, 0.0).groups == {}
    assert (scorer.texts, sorted(engine.flying)) == (["5"], ["0-1/0", "0-1/2"])
    (group,) = finished(own, engine).values()
    assert [info.uid for info in group.infos] == ["0-1/0", "0-1/1", "0-1/2"]


def test_what_a_job_leads_to_is_asked_at_once() -> None:
    """An engine that answers many together gets them together: jobs of one call, and turns that were ready together."""
    engine = Engine(lambda tokens: 0 if tokens[-1] == 5 else 5)
    own = made(engine, None, around(Echo(2)))
    own.submit({0: job("0-1", 2), 1: job("0-2", 1)})
    finished(own, engine, 2)
    assert engine.starts == [["0-1/0", "0-1/1", "0-2/0"], ["0-1/0+4", "0-1/1+4", "0-2/0+4"]]


def test_take_gives_what_has_ended_and_waits_no_longer_than_told() -> None:
    engine = Engine(lambda tokens: 0)
    own = made(engine)
    own.submit({5: job("0-1", 1), 6: job("0-2", 2), 7: job("0-3", 1)})
    assert own.take(3, 0.05).groups == {}
    engine.step(["0-3/0", "0-2/1"])
    assert list(own.take(0, 0.0).groups) == [7]
    assert own.take(0, 0.0).groups == {}  # once only
    engine.step(["0-2/0"])
    engine.step(["0-1/0"])
    assert sorted(own.take(1, 0.0).groups) == [5, 6]  # all that is there, though one was asked for


def test_take_waits_until_enough_have_ended() -> None:
    """Answers come from another thread while `take` waits: here, from the engine's look whether it lives."""
    engine = Engine(lambda tokens: 0)
    own = made(engine)
    engine.check = lambda: engine.step([min(engine.flying)])  # type: ignore[method-assign]
    own.submit({number: job(f"0-{number}", 1) for number in range(3)})
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(generation, "POLL_SECONDS", 0.001)
        assert list(own.take(2, 60.0).groups) == [0, 1]
    assert list(engine.flying) == ["0-2/0"]


def test_a_job_that_is_under_way_is_not_taken_twice() -> None:
    own = made(Engine(lambda tokens: 5))
    own.submit({1: job("0-1", 1)})
    with pytest.raises(AssertionError, match="job 1 is under way"):
        own.submit({1: job("0-2", 1)})


def test_a_request_that_the_engine_refuses_is_raised() -> None:
    engine = Engine(lambda tokens: 5)
    own = made(engine)
    own.submit({1: job("0-1", 1)})
    _, _, put = engine.flying["0-1/0"]
    put(RuntimeError("SGLang refused request 0-1/0: too long"))
    with pytest.raises(RuntimeError, match="too long"):
        own.take(1, 1.0)
    put(RuntimeError("SGLang refused request 0-1/0: no connection"))
    engine.is_dead = True  # then that is why
    with pytest.raises(RuntimeError, match="SGLang has died"):
        own.take(1, 1.0)


@pytest.mark.parametrize("call", [lambda own: own.take(1, 60.0), lambda own: own.stop(60.0)])
def test_an_engine_that_dies_is_found_out(monkeypatch: pytest.MonkeyPatch, call: Callable[[Generation], Any]) -> None:
    monkeypatch.setattr(generation, "POLL_SECONDS", 0.001)
    engine = Engine(lambda tokens: 5)
    engine.deaf_to = 10**9
    own = made(engine)
    own.submit({1: job("0-1", 1)})
    engine.is_dead = True
    with pytest.raises(RuntimeError, match="SGLang has died"):
        call(own)


def test_close_ends_the_processes_of_rewards_and_environment() -> None:
    scorer, echo = DigitSum(), Echo(1)
    made(Numbered(), scorer, around(echo)).close()
    assert (scorer.closed, echo.closed) == (1, 1)


def test_answers_near_the_limit_lose_some_of_their_score_and_cut_ones_are_not_learned_from() -> None:
    """Of 8 tokens the last 4 are punished by 0.5 in all: 6 tokens lose 0.25, 8 lose 0.5. Fives score 5 each."""
    engine = Engine(lambda tokens: 5)
    own = made(engine)
    shaping = Shaping(8, buffer=4, factor=0.5, masks_truncated=True)
    own.submit({0: job("0-1", 3, with_baseline=True, shaping=shaping)})
    for step in range(8):
        for uid, end in (("0-1/0", 4), ("0-1/1", 6), ("0-1/baseline", 6)):
            if step == end:
                engine.end(uid, "stop")
        engine.step()
    (group,) = own.take(1, 0.0).groups.values()
    assert [(info.score, info.finish_reason) for info in group.infos] == [
        (20.0, "stop"),
        (29.75, "stop"),
        (39.5, "length"),
    ]
    assert [sample.penalty for sample in samples(group)] == [0.0, -0.25, -0.5]
    assert [sample.loss_mask.tolist() for sample in samples(group)] == [[True] * 4, [True] * 6, [False] * 8]
    assert [info.baseline for info in group.infos] == [29.75] * 3


# ------------------------------------------------------------------------------------------------ turns


def three_then_stop(tokens: tuple[int, ...]) -> int:
    """Turns of 3, n and the stop token 0, where n counts the tokens before it modulo 10."""
    if tokens[-1] == 3:
        return max(len(tokens) % 10, 4)
    return 0 if len(tokens) > 2 and tokens[-2] == 3 else 3


def test_turns_and_observations_by_hand() -> None:
    """Prompt 1 2. Turn 3 4 0 (three tokens before the 4), told 7 4; turn 3 8 0 (eight before it), done."""
    engine, echo, scorer = Engine(three_then_stop), Echo(2), DigitSum()
    own = made(engine, scorer, around(echo))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=20))})
    (group,) = finished(own, engine).values()
    (sample,) = samples(group)
    assert sample.response_ids.tolist() == [3, 4, 0, 7, 4, 3, 8, 0]
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert sample.rollout_logprobs.tolist() == [-3, -4, -5, 0, 0, -8, -9, -10]
    assert sample.weight_versions.tolist() == [4] * 8
    assert (sample.finish_reason, group.infos[0].num_loss_tokens) == ("stop", 6)
    assert echo.heard == ["34", "38"]
    assert (scorer.texts, sample.score) == (["38"], 11.0)  # the environment gave none: the last turn is scored
    # The second turn is asked with all that was before, as tokens, and room for what is left.
    assert [(r.uid, r.prompt_ids.tolist(), r.sampling.max_new_tokens) for r in engine.requests] == [
        ("0-1/0", [1, 2], 20),
        ("0-1/0+5", [1, 2, 3, 4, 0, 7, 4], 15),
    ]
    assert (group.num_prompt_tokens, group.num_cached, len(group.ended)) == (2 + 7, 2, 1)


def test_the_score_is_the_sum_of_the_environments_rewards() -> None:
    engine, scorer = Engine(three_then_stop), DigitSum()
    own = made(engine, scorer, around(Echo(3, reward=0.25)))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=20))})
    (group,) = finished(own, engine).values()
    assert (group.infos[0].score, scorer.texts) == (0.75, [])


def test_a_reward_of_zero_is_the_environments_too() -> None:
    engine, scorer = Engine(three_then_stop), DigitSum()
    own = made(engine, scorer, around(Echo(1, reward=0.0)))
    own.submit({0: job("0-1", 1)})
    (group,) = finished(own, engine).values()
    assert (group.infos[0].score, scorer.texts) == (0.0, [])


def test_the_last_turn_that_is_allowed_ends_an_answer_and_is_heard() -> None:
    engine, echo = Engine(three_then_stop), Echo(9, reward=1.0)
    own = made(engine, None, around(echo, max_turns=2))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=100))})
    (group,) = finished(own, engine).values()
    assert (len(echo.heard), group.infos[0].score, group.infos[0].finish_reason) == (2, 2.0, "stop")
    assert samples(group)[0].response_ids.tolist() == [3, 4, 0, 7, 4, 3, 8, 0]


@pytest.mark.parametrize(
    ("limit", "tokens", "told"),
    [
        (2, [3, 4], 0),  # in the first turn: the environment never hears half a turn
        (3, [3, 4, 0], 1),
        (5, [3, 4, 0], 1),  # the observation fits, but no turn after it
        (6, [3, 4, 0, 7, 4, 3], 1),
        (8, [3, 4, 0, 7, 4, 3, 8, 0], 2),
        (10, [3, 4, 0, 7, 4, 3, 8, 0], 2),
        (11, [3, 4, 0, 7, 4, 3, 8, 0, 7, 8, 3], 2),
    ],
)
def test_turns_and_observations_together_take_no_more_tokens_than_an_answer_may(
    limit: int, tokens: list[int], told: int
) -> None:
    engine, echo = Engine(three_then_stop), Echo(9, reward=0.5)
    own = made(engine, None, around(echo))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=limit))})
    (group,) = finished(own, engine).values()
    (sample,) = samples(group)
    assert (sample.response_ids.tolist(), sample.finish_reason, len(echo.heard)) == (tokens, "length", told)
    assert sample.loss_mask[-1]  # where the score is given
    if told:
        assert sample.score == 0.5 * told


def test_an_observation_is_as_long_as_it_may_be_and_may_say_nothing() -> None:
    engine = Engine(three_then_stop)
    own = made(engine, None, around(Echo(2), max_observation_tokens=1))
    own.submit({0: job("0-1", 1)})
    (group,) = finished(own, engine).values()
    assert samples(group)[0].response_ids.tolist() == [3, 4, 0, 7, 3, 7, 0]
    scorer = DigitSum()
    own = made(engine, scorer, around(Echo(2), max_observation_tokens=0))
    own.submit({0: job("0-1", 1)})
    (group,) = finished(own, engine).values()
    assert samples(group)[0].response_ids.tolist() == [3, 4, 0, 3, 6, 0]
    assert scorer.texts == ["36"]  # still two turns


@pytest.mark.parametrize(
    ("broken", "tokens", "why"),
    [(-1, [], "KeyError: 'x'"), (2, [3, 4, 0, 7, 4, 3, 8, 0], "environment timed out after 10 s")],
)
def test_an_environment_that_fails_is_a_score_of_0_with_the_reason(broken: int, tokens: list[int], why: str) -> None:
    engine, scorer = Engine(three_then_stop), DigitSum()
    own = made(engine, scorer, around(Echo(3, reward=0.5, broken=broken)))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=20))})
    (group,) = finished(own, engine).values()
    (info,) = group.infos
    assert (info.score, info.reward_error, scorer.texts) == (0.0, why, [])
    assert samples(group)[0].response_ids.tolist() == tokens


def test_an_environment_may_take_its_time_while_others_write() -> None:
    engine, echo = Engine(three_then_stop), Echo(2, now=False)
    own = made(engine, None, around(echo))
    own.submit({0: replace(job("0-1", 2), sampling=replace(SAMPLING, max_new_tokens=20))})
    assert engine.flying == {}  # not before it has begun
    future, value = echo.waiting.pop(0)
    future.set_result(value)
    own.take(1, 0.0)
    assert list(engine.flying) == ["0-1/0"]
    groups = finished(own, engine, 1, echo)
    assert [sample.response_ids.tolist() for sample in samples(groups[0])] == [[3, 4, 0, 7, 4, 3, 8, 0]] * 2


# ------------------------------------------------------------------------------------------------ stopping


def test_what_was_begun_goes_on_elsewhere_under_newer_weights() -> None:
    """Answer 0 is whole, answer 1 has two tokens, answer 2 none."""
    counting: Rule = lambda tokens: 0 if len(tokens) == 6 else len(tokens)  # noqa: E731
    first = Engine(counting)
    own = made(first)
    own.submit({8: job("0-1", 3)})
    for uids in (["0-1/0"],) * 3 + (["0-1/0", "0-1/1"], ["0-1/0", "0-1/1"]):
        first.step(uids)
    stopped = own.stop(1.0)
    assert (stopped.groups, list(stopped.jobs), first.flying) == ({}, [8], {})
    begun = stopped.jobs[8].begun
    assert [trajectory.length for trajectory in begun] == [5, 2, 0]
    assert [trajectory.finish_reason for trajectory in begun] == ["stop", None, None]
    second = Engine(counting, version=5)
    other = made(second)
    other.submit({3: stopped.jobs[8]})
    assert [request.uid for request in second.requests] == ["0-1/1+2", "0-1/2"]
    groups = finished(other, second)
    found = samples(groups[3])
    assert [sample.response_ids.tolist() for sample in found] == [[2, 3, 4, 5, 0]] * 3
    assert [sample.weight_versions.tolist() for sample in found] == [[4] * 5, [4, 4, 5, 5, 5], [5] * 5]
    assert [sample.rollout_logprobs.tolist() for sample in found] == [[-3, -4, -5, -6, -7]] * 3
    assert [info.min_weight_version for info in groups[3].infos] == [4, 4, 5]
    assert [info.score for info in groups[3].infos] == [14.0] * 3
    assert all(sample.loss_mask.all() for sample in found)


def test_groups_that_are_whole_when_it_stops_come_as_groups() -> None:
    engine = Engine(lambda tokens: 0)
    own = made(engine)
    own.submit({1: job("0-1", 1), 2: job("0-2", 1)})
    engine.step(["0-2/0"])
    stopped = own.stop(1.0)
    assert ([info.uid for info in stopped.groups[2].infos], list(stopped.jobs)) == (["0-2/0"], [1])
    assert own.take(0, 0.0).groups == {}


def test_nothing_is_left_behind_by_a_stop() -> None:
    """The same process takes the jobs up again, under the same numbers, with late scores of before still coming."""
    engine, scorer = Engine(lambda tokens: 0 if len(tokens) == 4 else 5), DigitSum(now=False)
    own = made(engine, scorer)
    own.submit({1: job("0-1", 2), 2: job("0-2", 1)})
    for _ in range(3):
        engine.step(["0-1/0", "0-2/0"])
    assert own.take(0, 0.0).groups == {}
    late, scorer.waiting = scorer.waiting, []
    stopped = own.stop(1.0)
    own.submit(stopped.jobs)
    for future, _ in late:
        future.set_result((99.0, None))
    groups = finished(own, engine, 2, scorer)
    assert [[info.score for info in groups[number].infos] for number in (1, 2)] == [[10.0, 10.0], [10.0]]
    assert own.stop(1.0) == generation.Stopped({}, {})
    assert own._asked == {}


def test_a_stop_while_the_environment_has_not_answered_asks_it_again() -> None:
    first, echo = Engine(three_then_stop), Echo(2, reward=0.5, now=False)
    own = made(first, None, around(echo))
    wide = replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=20))
    own.submit({0: wide})
    echo.answer()
    own.take(0, 0.0)
    for _ in range(3):
        first.step()
    own.take(0, 0.0)
    assert echo.heard == ["34"]
    stopped = own.stop(1.0)
    (begun,) = stopped.jobs[0].begun
    assert (begun.length, begun.num_turns, begun.is_answered, begun.rewards) == (3, 1, False, ())
    second, again = Engine(three_then_stop, version=5), Echo(2, reward=0.5)
    other = made(second, None, around(again))
    other.submit({0: stopped.jobs[0]})
    (group,) = finished(other, second).values()
    (sample,) = samples(group)
    assert sample.response_ids.tolist() == [3, 4, 0, 7, 4, 3, 8, 0]
    assert sample.weight_versions.tolist() == [4] * 5 + [5] * 3  # an observation has the version of its turn
    assert (again.heard, again.num_resets, sample.score) == (["34", "38"], 0, 1.0)


@pytest.mark.parametrize("ready", ["reset", "turn", "step"])
def test_a_stop_asks_nothing_more_of_the_engine(ready: str) -> None:
    """The environment's first state, the end of a turn or the environment's answer lies there when it is told to
    stop."""
    engine, echo = Engine(three_then_stop), Echo(2, now=ready == "turn")
    own = made(engine, None, around(echo))
    own.submit({0: replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=20))})
    if ready != "reset":
        echo.answer()
        own.take(0, 0.0)
        for _ in range(3):
            engine.step()
    if ready == "step":
        own.take(0, 0.0)
    echo.answer()
    asked = len(engine.requests)
    stopped = own.stop(1.0)
    assert len(engine.requests) == asked
    assert stopped.jobs[0].begun[0].length == {"reset": 0, "turn": 3, "step": 5}[ready]
    other = made(engine, None, around(Echo(2)))
    other.submit({0: stopped.jobs[0]})
    (group,) = finished(other, engine).values()
    assert samples(group)[0].response_ids.tolist() == [3, 4, 0, 7, 4, 3, 8, 0]


def test_why_the_environment_failed_is_kept_over_a_stop() -> None:
    engine = Engine(three_then_stop)
    own = made(engine, None, around(Echo(2, broken=1)))
    own.submit({0: replace(job("0-1", 2), sampling=replace(SAMPLING, max_new_tokens=20))})
    for _ in range(3):
        engine.step(["0-1/0"])
    own.take(0, 0.0)
    stopped = own.stop(1.0)
    other = made(engine, None, around(Echo(2)))
    other.submit({0: stopped.jobs[0]})
    (group,) = finished(other, engine).values()
    assert [(info.score, info.reward_error) for info in group.infos] == [
        (0.0, "environment timed out after 10 s"),
        (11.0, None),
    ]


def test_the_baseline_goes_on_as_the_baseline() -> None:
    engine = Engine(lambda tokens: 0 if len(tokens) == 5 else 5)
    own = made(engine)
    own.submit({0: job("0-1", 1, with_baseline=True)})
    engine.step(["0-1/baseline"])
    stopped = own.stop(1.0)
    own.submit(stopped.jobs)
    (group,) = finished(own, engine).values()
    resumed = engine.requests[-1]
    assert (resumed.uid, resumed.sampling.temperature, resumed.sampling.max_new_tokens) == ("0-1/baseline+1", 0.0, 7)
    assert [(info.uid, info.baseline) for info in group.infos] == [("0-1/0", 15.0)]


def test_an_answer_that_was_stopped_at_its_last_token_is_whole() -> None:
    engine = Engine(lambda tokens: 5)
    own = made(engine)
    short = replace(job("0-1", 1), sampling=replace(SAMPLING, max_new_tokens=2))
    result = GenerationResult("0-1/0", np.array([5, 5]), np.zeros(2, np.float32), "abort", 4)
    own.submit({0: replace(short, begun=(Trajectory().with_result(result),))})
    (group,) = own.take(1, 0.0).groups.values()
    assert (group.infos[0].finish_reason, group.infos[0].score, engine.requests) == ("length", 10.0, [])


def test_an_abort_is_said_again_to_an_engine_that_had_not_got_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "POLL_SECONDS", 0.001)
    engine = Engine(lambda tokens: 5)
    engine.deaf_to = 2
    own = made(engine)
    own.submit({0: job("0-1", 1)})
    assert list(own.stop(60.0).jobs) == [0]
    assert engine.aborts == 3


def test_an_engine_that_does_not_stop_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "POLL_SECONDS", 0.001)
    engine = Engine(lambda tokens: 5)
    engine.deaf_to = 10**9
    own = made(engine)
    own.submit({0: job("0-1", 2)})
    with pytest.raises(RuntimeError, match=r"2 requests did not end within 0\.01 s of an abort"):
        own.stop(0.01)


def hashed(tokens: tuple[int, ...]) -> int:
    """A token from 0 to 9 that depends on every token before it and their order; 0 ends a turn."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % 10


Moves = list[tuple[str, int]]


def play(own_job: Job, turns: int, moves: Moves) -> Group:
    """A group of an answer that is stopped, taken up and moved as `moves` say; all else goes on until it has ended."""
    engine, scorer, echo = Engine(hashed), DigitSum(now=False), Echo(turns, reward=0.5, now=False)
    own = made(engine, scorer, around(echo, max_turns=4))
    own.submit({0: own_job})
    for move, count in moves:
        if move == "stop":
            stopped = own.stop(1.0)
            if stopped.groups:
                return stopped.groups[0]
            engine = Engine(hashed, version=engine.version + 1)
            scorer, echo = DigitSum(now=False), Echo(turns, reward=0.5, now=False)
            own = made(engine, scorer, around(echo, max_turns=4))
            own.submit({0: stopped.jobs[0]})
        elif move == "write":
            engine.step(sorted(engine.flying)[:count])
        elif move == "answer":
            echo.answer()
        elif move == "score":
            scorer.answer()
        elif groups := own.take(0, 0.0).groups:
            return groups[0]
    return finished(own, engine, 1, echo, scorer)[0]


MOVES = st.lists(st.tuples(st.sampled_from(["stop", "write", "answer", "score", "take"]), st.integers(1, 3)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 9), st.integers(1, 3), st.booleans(), st.integers(1, 30), st.integers(1, 4), MOVES.filter(bool))
def test_answers_that_are_stopped_at_any_time_are_as_if_they_had_not_been(
    first: int, answers: int, with_baseline: bool, most: int, turns: int, moves: Moves
) -> None:
    """Tokens, log-probs (they tell the position), mask, scores and ends are the same; versions grow."""
    prompt = Prompt("0-1", np.array([first, 2]), "s", "")
    sampling = replace(SAMPLING, max_new_tokens=most)
    own_job = Job(prompt, answers, sampling, 5, "exact", with_baseline=with_baseline)
    expected, found = play(own_job, turns, []), play(own_job, turns, moves)
    for own, other in zip(samples(found), samples(expected), strict=True):
        assert own.response_ids.tolist() == other.response_ids.tolist()
        assert own.rollout_logprobs.tolist() == other.rollout_logprobs.tolist()
        assert own.loss_mask.tolist() == other.loss_mask.tolist()
        assert (own.score, own.finish_reason, own.uid) == (other.score, other.finish_reason, other.uid)
        versions = own.weight_versions.tolist()
        assert versions == sorted(versions)
        assert len(versions) == len(own.response_ids)
    assert [info.baseline for info in found.infos] == [info.baseline for info in expected.infos]


def test_a_greedy_answer_that_could_not_be_scored_teaches_nothing_and_says_why() -> None:
    """Its score would be 0, and all others look good beside it. It is 9 0."""

    class WithBaseline(Numbered):
        def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
            super().start([r for r in requests if not r.uid.endswith("baseline")], put)
            put(GenerationResult(requests[-1].uid, np.array([9, 0]), np.zeros(2, np.float32), "stop", 4))

    class Failing(DigitSum):
        def score(self, job: Job, answer: str) -> Any:
            return self.give((0.0, "reward timed out after 5 s") if answer == "9" else (float(answer), None))

    own = made(WithBaseline(), Failing())
    own.submit({3: job("0-1", 2, with_baseline=True)})
    (group,) = own.take(1, 0.0).groups.values()
    assert [info.baseline for info in group.infos] == [info.score for info in group.infos]
    assert {info.reward_error for info in group.infos} == {"of the greedy answer: reward timed out after 5 s"}


def test_an_engine_that_answers_at_once_gets_all_turns_together() -> None:
    """Four resets come one after the other, and so do the answers to the turns; it is asked once for each turn."""

    class AtOnce(Numbered):
        answers_at_once = True

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        def start(self, requests: Sequence[GenerationRequest], put: Callable[..., None]) -> None:
            self.calls.append(len(requests))
            for request in requests:
                put(GenerationResult(request.uid, np.array([1, 0]), np.zeros(2, np.float32), "stop", 4))

    engine, environment = AtOnce(), Echo(turns=2, reward=1.0, now=False)
    own = made(engine, surroundings=around(environment))
    own.submit({n: job(f"0-{n}", 1) for n in range(4)})
    taken: dict[int, Group] = {}
    for _ in range(40):
        if environment.waiting:  # one call at a time comes back
            future, value = environment.waiting.pop(0)
            future.set_result(value)
        taken |= own.take(1, 0.01).groups
    assert sorted(taken) == [0, 1, 2, 3]
    assert engine.calls == [4, 4]
