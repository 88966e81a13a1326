"""From prompts to scored samples: what every process that hosts an engine does.

    generation = Generation(engine, scorer)
    generation.submit({0: Job(prompt, 8, sampling, seed, "gsm8k")})
    generation.take(at_least=1, wait=5.0)  # Taken({0: Group(...)}, ...)

An answer is a `Trajectory`: turns of the policy and, with an environment, what that says between them, as tokens that
are never tokenised again. It can be stopped between any two tokens and taken up by any process.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import ray
from transformers import AutoTokenizer

from megarl.algorithms.shaping import overlong_penalty, without_truncated
from megarl.config import Config, RewardConfig
from megarl.environments import Environments, ObservationTokens, Step
from megarl.rewards import RewardPool, Scored
from megarl.types import (
    Activity,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SampleInfo,
    SamplingParams,
    Segment,
)

POLL_SECONDS = 0.5
"""Between two looks whether the engine still lives."""

BASELINE = "baseline"
"""In the name of the greedy answer that others are compared with: "0-17/baseline"."""


@dataclass(frozen=True)
class Trajectory:
    """An answer on its way."""

    segments: tuple[Segment, ...] = ()
    num_turns: int = 0
    """Turns that the policy has ended."""
    is_answered: bool = True
    """Whether the environment has answered to all of these."""
    finish_reason: FinishReason | None = None
    """Why it is whole; None: it goes on."""
    state: Mapping[str, Any] | None = None
    """The environment's, after the last turn."""
    rewards: tuple[float, ...] = ()
    """That the environment has given."""
    error: str | None = None
    """Why the environment failed, if it did: the answer then scores 0."""

    @property
    def length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    def with_result(self, result: GenerationResult) -> Trajectory:
        """The trajectory with what the policy went on to write."""
        has_ended = result.finish_reason == "stop"
        segments = self.segments
        if len(result.response_ids):
            segments += (Segment(result.response_ids, result.logprobs, True, result.weight_version),)
        num_turns = self.num_turns + has_ended
        return replace(self, segments=segments, num_turns=num_turns, is_answered=not has_ended)

    def with_observation(self, token_ids: Any) -> Trajectory:
        """The trajectory with what the environment said to its last turn."""
        said = Segment(
            np.asarray(token_ids, np.int64),
            np.zeros(len(token_ids), np.float32),
            False,
            self.segments[-1].weight_version if self.segments else 0,
        )
        return replace(self, segments=(*self.segments, said), is_answered=True)

    def last_turn(self) -> list[int]:
        """The tokens that the policy has written since the last observation."""
        turn: list[int] = []
        for segment in reversed(self.segments):
            if not segment.by_policy:
                break
            turn = [*map(int, segment.token_ids), *turn]
        return turn


@dataclass(frozen=True)
class Shaping:
    """What is done about training answers that come near data.max_response_length, or are cut at it."""

    max_length: int
    buffer: int = 0
    factor: float = 1.0
    masks_truncated: bool = False

    def penalty(self, trajectory: Trajectory) -> float:
        """What is added to the score."""
        return overlong_penalty(trajectory.length, self.max_length, self.buffer, self.factor)


@dataclass(frozen=True)
class Job:
    """Answers wanted to one prompt, and how to draw them."""

    prompt: Prompt
    num_answers: int
    sampling: SamplingParams
    seed: int
    reward: str
    """The reward function's name."""
    with_texts: bool = False
    with_baseline: bool = False
    """One more answer, drawn greedily, whose score the others are compared with."""
    shaping: Shaping | None = None
    begun: tuple[Trajectory, ...] = ()
    """What earlier processes have written of each answer, the baseline's last; empty: nothing yet."""

    @property
    def num_trajectories(self) -> int:
        return self.num_answers + self.with_baseline

    def name(self, k: int) -> str:
        return f"{self.prompt.uid}/{BASELINE if k == self.num_answers else k}"

    def request(self, k: int, trajectory: Trajectory) -> GenerationRequest:
        """What answer k needs next: the rest of the turn that it is in. Requests for one answer differ in their name,
        and with it in their seed, by the tokens before them."""
        name = self.name(k)
        uid, sampling = f"{name}+{trajectory.length}" if trajectory.segments else name, self.sampling
        left = sampling.max_new_tokens - trajectory.length
        if k == self.num_answers:
            sampling = SamplingParams(left, 0.0, stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos)
        token_ids = np.concatenate([self.prompt.token_ids, *(s.token_ids for s in trajectory.segments)])
        return GenerationRequest(uid, token_ids, replace(sampling, max_new_tokens=left), request_seed(self.seed, uid))


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, as the driver knows them: scalars, a reference to the samples, and texts where asked
    for."""

    infos: tuple[SampleInfo, ...]
    samples: Any
    """Reference to a list[Sample] in the object store."""
    texts: tuple[tuple[str, str], ...] = ()
    """(prompt, answer) of each sample, for logs."""
    ended: tuple[float, ...] = ()
    """Seconds from the job's arrival to the end of each answer."""
    scored: float = 0.0
    """To the last score."""
    num_prompt_tokens: int = 0
    """Of all requests; of these the engine's cache held num_cached."""
    num_cached: int = 0

    @functools.cached_property
    def has_equal_rewards(self) -> bool:
        """Whether all answers got the same, penalties for their length not counted. Rounded: one that was added and
        taken away again leaves a trace."""
        return len({round(info.rule_score, 6) for info in self.infos}) <= 1


@dataclass(frozen=True)
class Taken:
    """Groups that have ended, by the numbers of their jobs."""

    groups: dict[int, Group]
    activity: Activity = Activity()
    num_open: int = 0
    """Answers of other groups that have not ended."""


@dataclass(frozen=True)
class Stopped:
    """What a process had when it was told to stop: whole groups, and jobs with what was begun of their answers."""

    groups: dict[int, Group]
    jobs: dict[int, Job]


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
        self._pool = RewardPool(functions, reward.num_workers, reward.time_limit, reward.memory_mb, reward.options)

    def text(self, token_ids: Sequence[int]) -> str:
        decoded: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded

    def score(self, job: Job, answer: str) -> PendingScore:
        """Start scoring an answer."""
        prompt = job.prompt
        return self._pool.submit(job.reward, (prompt.data_source, answer, prompt.ground_truth, prompt.extra_info))

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()


@dataclass(frozen=True)
class Surroundings:
    """The environment that answers to the policy's turns, and how its words become tokens."""

    environments: Environments
    observation_tokens: ObservationTokens
    max_turns: int
    max_observation_tokens: int

    @classmethod
    def of(cls, config: Config, tokenizer: Any, stop_token_ids: Sequence[int]) -> Surroundings | None:
        own = config.environment
        if own.function is None:
            return None
        return cls(
            Environments(own.function, own.num_workers, own.time_limit, own.memory_mb),
            ObservationTokens(tokenizer, config.data.apply_chat_template, stop_token_ids),
            own.max_turns,
            own.max_observation_tokens,
        )


class Engine(Protocol):
    """What generation needs of an engine."""

    answers_at_once: bool
    """Whether `start` returns with all answers: requests then go to it together."""

    def start(self, requests: Sequence[GenerationRequest], put: Callable[[GenerationResult | Exception], None]) -> None:
        """Begin to answer; `put` gets each result as it ends, from any thread."""

    def abort_all(self) -> None:
        """End every request in flight with what it has."""

    def check(self) -> None:
        """Raises RuntimeError when the engine lives no more."""

    def activity(self) -> Activity:
        """Since it was last asked."""


@dataclass
class _Answer:
    """An answer of an open job."""

    trajectory: Trajectory
    ended: float | None = None
    score: tuple[float, str | None] | None = None


@dataclass
class _Open:
    """A job that is not done."""

    job: Job
    answers: list[_Answer]
    arrived: float = field(default_factory=time.perf_counter)
    num_prompt_tokens: int = 0
    num_cached: int = 0


class Generation:
    """Jobs of one process, from prompts to scored groups. All methods are for one thread; the engine, environments and
    rewards work in others."""

    def __init__(self, engine: Engine, scorer: Scorer, surroundings: Surroundings | None = None) -> None:
        self._engine, self._scorer, self._surroundings = engine, scorer, surroundings
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._asked: dict[str, tuple[int, int]] = {}
        """By request, the job's number and the answer's."""
        self._to_ask: list[GenerationRequest] = []
        self._ended: dict[int, Group] = {}
        self._num_called = 0
        """Calls of the environment that are under way."""
        self._is_stopping = False

    @classmethod
    def of(cls, engine: Engine, config: Config, folder: str, stop_token_ids: Sequence[int]) -> Generation:
        """With the rewards and the environment of the run; folder: the model's."""
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.tokenizer_path or folder, trust_remote_code=config.model.trust_remote_code
        )
        return cls(engine, Scorer(tokenizer, config.reward), Surroundings.of(config, tokenizer, stop_token_ids))

    def submit(self, jobs: Mapping[int, Job]) -> None:
        """Begin jobs, each under a number of the caller's; `take` gives their groups."""
        for number, job in jobs.items():
            assert number not in self._open, f"job {number} is under way already"
            begun = job.begun or (Trajectory(),) * job.num_trajectories
            self._open[number] = _Open(job, [_Answer(trajectory) for trajectory in begun])
            for k in range(job.num_trajectories):
                self._begin(number, k)
        self._ask()

    def take(self, at_least: int, wait: float) -> Taken:
        """Groups that have ended since the last call: `at_least` so many, or what there is after `wait` seconds.

        Raises:
            RuntimeError: the engine refused a request, or died.
        """
        end = time.monotonic() + wait
        self._handle_all()
        while len(self._ended) < at_least and (left := end - time.monotonic()) > 0:
            self._wait(min(left, POLL_SECONDS))
        groups, self._ended = self._ended, {}
        num_open = sum(answer.ended is None for own in self._open.values() for answer in own.answers)
        return Taken(groups, self._engine.activity(), num_open)

    def stop(self, deadline: float) -> Stopped:
        """End all that is under way; what was begun is given back.

        Raises:
            RuntimeError: the engine still works on requests after `deadline` seconds.
        """
        end, self._is_stopping = time.monotonic() + deadline, True
        try:
            self._handle_all()
            while self._asked:
                if time.monotonic() > end:
                    raise RuntimeError(f"{len(self._asked)} requests did not end within {deadline:g} s of an abort")
                self._engine.abort_all()  # again each time: some may have been on their way to the engine before
                self._wait(POLL_SECONDS)
        finally:
            self._is_stopping = False
        jobs = {
            number: replace(own.job, begun=tuple(answer.trajectory for answer in own.answers))
            for number, own in self._open.items()
        }
        groups, self._ended = self._ended, {}
        self._open = {}
        self._engine.activity()  # what it did for these is nobody's
        return Stopped(groups, jobs)

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self._scorer.close()
        if self._surroundings is not None:
            self._surroundings.environments.close()

    # -------------------------------------------------------------------------------------------- events

    def _wait(self, seconds: float) -> None:
        """Handle what comes within so many seconds."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            self._engine.check()
            return
        event()
        self._handle_all()

    def _handle_all(self) -> None:
        """Handle what is there, then ask the engine for all that this led to at once."""
        while True:
            try:
                self._events.get_nowait()()
            except queue.Empty:
                if not self._to_ask or self._waits_for_more:
                    return
                self._ask()

    @property
    def _waits_for_more(self) -> bool:
        """Whether requests are on their way that are to be in one batch with those that are there, so that what shares
        a batch does not hang on the clock."""
        return self._engine.answers_at_once and self._num_called > 0

    def _ask(self) -> None:
        if self._to_ask and not self._waits_for_more:
            requests, self._to_ask = self._to_ask, []
            self._engine.start(requests, lambda result: self._events.put(functools.partial(self._answered, result)))

    def _when_done(self, future: Any, then: Callable[[Any], None], number: int, is_call: bool = False) -> None:
        """Call `then` with the future's result as an event, unless the job was stopped meanwhile. is_call: it is the
        environment's, after which there may be a request."""
        own = self._open[number]

        def handle(was_open: bool) -> None:
            self._num_called -= was_open
            if self._open.get(number) is own:
                then(future.result())

        if future.done():
            handle(False)
        else:
            self._num_called += is_call
            future.add_done_callback(lambda _: self._events.put(functools.partial(handle, is_call)))

    # -------------------------------------------------------------------------------------------- one answer

    def _begin(self, number: int, k: int) -> None:
        own = self._open[number]
        answer = own.answers[k]
        if answer.trajectory.finish_reason is not None:
            self._end(number, k, answer.trajectory.finish_reason)
            return
        if self._surroundings is None or answer.trajectory.state is not None:
            self._go_on(number, k)
            return

        def opened(found: tuple[Mapping[str, Any] | None, str | None]) -> None:
            state, error = found
            answer.trajectory = replace(answer.trajectory, state=state, error=error)
            if state is None:
                self._end(number, k, "stop")
            else:
                self._go_on(number, k)

        self._when_done(self._surroundings.environments.reset(own.job.prompt), opened, number, is_call=True)

    def _go_on(self, number: int, k: int) -> None:
        """Have the policy, or the environment, add to an answer; not while all is being stopped."""
        if self._is_stopping:
            return
        own = self._open[number]
        if self._surroundings is not None and not own.answers[k].trajectory.is_answered:
            self._step(number, k, self._surroundings)
            return
        request = own.job.request(k, own.answers[k].trajectory)
        if request.sampling.max_new_tokens < 1:
            self._end(number, k, "length")
            return
        own.num_prompt_tokens += len(request.prompt_ids)
        self._asked[request.uid] = (number, k)
        self._to_ask.append(request)

    def _answered(self, result: GenerationResult | Exception) -> None:
        if isinstance(result, Exception):
            self._engine.check()  # what a request fails of then is a consequence
            raise result
        number, k = self._asked.pop(result.uid)
        own = self._open[number]
        own.num_cached += result.cached_tokens
        answer = own.answers[k]
        answer.trajectory = answer.trajectory.with_result(result)
        if result.finish_reason == "abort" and self._is_stopping:
            return
        if result.finish_reason == "stop" and self._surroundings is not None:
            self._go_on(number, k)
        else:
            self._end(number, k, result.finish_reason)

    def _step(self, number: int, k: int, surroundings: Surroundings) -> None:
        """Ask the environment what it says to the turn that has ended."""
        own = self._open[number]
        answer = own.answers[k]

        def stepped(found: tuple[Step | None, str | None]) -> None:
            step, error = found
            if step is None:
                answer.trajectory = replace(answer.trajectory, error=error)
                self._end(number, k, "stop")
                return
            rewards = answer.trajectory.rewards + (() if step.reward is None else (step.reward,))
            answer.trajectory = replace(answer.trajectory, state=step.state, rewards=rewards)
            if step.done or answer.trajectory.num_turns >= surroundings.max_turns:
                self._end(number, k, "stop")
                return
            most = surroundings.max_observation_tokens
            said = surroundings.observation_tokens(step.role, step.observation, most)
            if answer.trajectory.length + len(said) >= own.job.sampling.max_new_tokens:
                self._end(number, k, "length")  # no room for a turn after it
                return
            answer.trajectory = answer.trajectory.with_observation(said)
            self._go_on(number, k)

        assert answer.trajectory.state is not None, "an environment that was not reset"
        text = self._scorer.text(answer.trajectory.last_turn())
        call = surroundings.environments.step(answer.trajectory.state, text)
        self._when_done(call, stepped, number, is_call=True)

    def _end(self, number: int, k: int, finish_reason: FinishReason) -> None:
        """Score an answer: by the sum of what the environment gave, else by the reward function on its last turn."""
        own = self._open[number]
        answer = own.answers[k]
        answer.trajectory = replace(answer.trajectory, finish_reason=finish_reason)
        answer.ended = time.perf_counter() - own.arrived

        def scored(score: tuple[float, str | None]) -> None:
            answer.score = score
            if all(other.score is not None for other in own.answers):
                self._finish(number)

        if answer.trajectory.error is not None:
            scored((0.0, answer.trajectory.error))
        elif answer.trajectory.rewards:
            scored((sum(answer.trajectory.rewards), None))
        else:
            text = self._scorer.text(answer.trajectory.last_turn())
            self._when_done(self._scorer.score(own.job, text), scored, number)

    def _finish(self, number: int) -> None:
        own = self._open.pop(number)
        job, counted = own.job, own.answers[: own.job.num_answers]
        samples = [_sample(job, k, answer) for k, answer in enumerate(counted)]
        infos = [SampleInfo.of(sample) for sample in samples]
        if job.with_baseline:
            infos = _with_baseline(infos, _sample(job, job.num_answers, own.answers[-1]))
        texts: tuple[tuple[str, str], ...] = ()
        if job.with_texts:
            decode = self._scorer.tokenizer.decode
            texts = tuple((decode(s.prompt_ids), decode(s.response_ids)) for s in samples)
        self._ended[number] = Group(
            tuple(infos),
            ray.put(samples),
            texts,
            tuple(answer.ended or 0.0 for answer in own.answers),
            time.perf_counter() - own.arrived,
            own.num_prompt_tokens,
            own.num_cached,
        )


def _with_baseline(infos: Sequence[SampleInfo], greedy: Sample) -> list[SampleInfo]:
    """Where the greedy answer's reward failed, nothing is learned from the others, and the reason is theirs too."""
    if greedy.reward_error is None:
        return [replace(info, baseline=greedy.score) for info in infos]
    reason = f"of the greedy answer: {greedy.reward_error}"
    return [replace(info, baseline=info.score, reward_error=info.reward_error or reason) for info in infos]


def _sample(job: Job, k: int, answer: _Answer) -> Sample:
    assert answer.score is not None, "an answer without a score"
    assert answer.trajectory.finish_reason is not None, "an answer that goes on"
    segments, finish_reason = answer.trajectory.segments, answer.trajectory.finish_reason
    lengths = [len(segment.token_ids) for segment in segments]
    loss_mask = np.repeat(np.array([s.by_policy for s in segments], np.bool_), lengths)
    penalty = 0.0
    if job.shaping is not None:
        penalty = job.shaping.penalty(answer.trajectory)
        if job.shaping.masks_truncated:
            loss_mask = without_truncated(loss_mask, finish_reason)
    return Sample(
        uid=job.name(k),
        group=job.prompt.uid,
        prompt_ids=job.prompt.token_ids,
        response_ids=np.concatenate([np.zeros(0, np.int64), *(s.token_ids for s in segments)]),
        rollout_logprobs=np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in segments)]),
        loss_mask=loss_mask,
        weight_versions=np.repeat(np.array([s.weight_version for s in segments], np.int64), lengths),
        score=answer.score[0] + penalty,
        finish_reason=finish_reason,
        data_source=job.prompt.data_source,
        reward_error=answer.score[1],
        penalty=penalty,
        prompt_content=job.prompt.content,
    )
