"""The rollout as the loop sees it: submit prompts, take the batch when its answers have ended, sleep while training,
resume."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from megarl.config import Config
from megarl.driver.routing import by_prefix, least_loaded
from megarl.engines.sglang import DEATH_LINES, EngineDied, log_tail
from megarl.types import Activity, Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee, WorkerError, gather
from megarl.workers.generation import Group, Job, Shaping, Stopped, Taken

RETIRE_SECONDS = 60.0
"""For a dead replica's process to clean up behind itself, before it is killed."""


DEATH_PATIENCE = 10.0
"""Seconds in which a replica that has died is found out, while others are busy."""


TAKE_SECONDS = 5.0
"""Longest that a replica is asked to wait for answers in one call."""

SHORT_TAKE_SECONDS = 0.2
"""The same where a batch may be full at any moment, and replicas are to stop then."""

AHEAD = 8
"""A replica has 1 / AHEAD more answers than it generates together, so that none is missing when one ends."""


class ReplicaDied(WorkerError):
    """A replica died while answers were in flight. Those of the others are kept; `Rollout.next_batch` asks again for
    what is missing, once the dead ones are replaced."""


@dataclass(frozen=True)
class Starter:
    """Starts replicas' processes, in their places."""

    create: Callable[[int], Any]
    """A process for a replica, by its number."""
    set_up: Callable[[int, Any], Any]
    """Has a replica's process start its engine; the call's reference."""
    logs: Sequence[str] = ()
    """By replica, the file of its engine's log."""


@dataclass(frozen=True)
class RolloutFigures:
    """How a batch came about. Shares are of the time from the first prompt's submission to the last answer's end."""

    activity: Activity = Activity()
    idle_share: float = 0.0
    """For which a replica had nothing to do, in the mean over replicas."""
    tail_share: float = 0.0
    """In which the last tenth of the answers was still being written."""
    cache_hit_rate: float = 0.0
    """Of prompt tokens, those that the KV cache held already."""


class RolloutBatch:
    """A step's samples, numbered from 0 in the order of their prompts; the driver holds scalars and references."""

    def __init__(self, groups: Sequence[Group], figures: RolloutFigures | None = None) -> None:
        self.infos: list[SampleInfo] = [info for group in groups for info in group.infos]
        self.texts: list[tuple[str, str]] = [text for group in groups for text in group.texts]
        self.figures = figures or RolloutFigures()
        ended = max((seconds for group in groups for seconds in group.ended), default=0.0)
        self.reward_seconds = max(max((group.scored for group in groups), default=0.0) - ended, 0.0)
        """For which the step waited for scores, from the last answer's end."""
        self.handles: dict[int, tuple[Any, int]] = {}
        self.groups: list[list[int]] = []
        start = 0
        for group in groups:
            indices = list(range(start, start + len(group.infos)))
            self.handles.update({i: (group.samples, k) for k, i in enumerate(indices)})
            self.groups.append(indices)
            start += len(indices)

    @property
    def lengths(self) -> list[int]:
        return [info.length for info in self.infos]

    @property
    def scores(self) -> list[float]:
        return [info.score for info in self.infos]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class Rollout:
    """Replicas of the rollout engine. With the hf engine these are the trainer processes themselves."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[Any],
        hosts: Sequence[str],
        embedded: bool,
        gpus: Sequence[str] = (),
        starter: Starter | None = None,
    ) -> None:
        """
        Args:
            hosts: of the workers.
            gpus: of the workers, for errors: " (GPU 4)".
            starter: makes new workers in the place of dead ones.
        """
        self._starter = starter
        self._deaths: list[str] = []
        self.config, self.workers, self.embedded = config, list(workers), embedded
        name = "hf engine of trainer rank" if embedded else "SGLang replica"
        self._callees = [
            Callee(f"{name} {i}{own}", host)
            for i, (host, own) in enumerate(zip(hosts, gpus or [""] * len(hosts), strict=True))
        ]
        replicas = range(len(self.workers))
        self._next_number = 0
        self._jobs: dict[int, Job] = {}
        """All that was submitted and is in no batch yet."""
        self._groups: dict[int, tuple[Group, Any]] = {}
        """Of those, what was answered, in the order in which it came; with the process that holds the samples."""
        self._queues: list[deque[int]] = [deque() for _ in replicas]
        """By replica, what it is to answer next."""
        self._sent: list[set[int]] = [set() for _ in replicas]
        """By replica, what it is answering."""
        self._submits: list[list[Any]] = [[] for _ in replicas]
        self._takes: dict[int, Any] = {}
        self._under_way: list[int] = [0 for _ in replicas]
        """By replica, answers that have not ended, as far as it has said; those of a prompt end one after the other."""
        self._sent_since_take: list[int] = [0 for _ in replicas]
        """By replica, answers that its last call for groups does not count."""
        self._activities: list[Activity] = []
        self._began = 0.0
        self._sent_at: dict[int, float] = {}
        """Seconds from `_began` until each job was sent."""
        self._idle, self._idle_since = [0.0 for _ in replicas], [0.0 for _ in replicas]
        """By replica, seconds that it had nothing to do before its last job, and when it began to have nothing."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        num_answers: int,
        sampling: SamplingParams,
        seed: int,
        reward: str,
        with_texts: bool = False,
        with_baseline: bool = False,
        shaping: Shaping | None = None,
    ) -> None:
        """Start generation of `num_answers` answers to each prompt; returns at once.

        Args:
            reward: the name of the function that scores them.
            with_baseline: one greedy answer more a prompt, whose score comes with the others.
            shaping: of scores and loss masks near the length limit.
        """
        if not self._jobs:
            self._began = time.perf_counter()
            self._idle, self._idle_since = [0.0 for _ in self.workers], [self._began for _ in self.workers]
        numbers = range(self._next_number, self._next_number + len(prompts))
        self._next_number = numbers.stop
        for number, prompt in zip(numbers, prompts, strict=True):
            self._jobs[number] = Job(prompt, num_answers, sampling, seed, reward, with_texts, with_baseline, shaping)
        self._route(list(numbers))
        self._send()

    def next_batch(self) -> RolloutBatch:
        """All that was submitted, in that order, when its answers have ended and are scored.

        Raises:
            ReplicaDied: before they had; `replace` the dead, sync, and call this again.
        """
        assert self._jobs, "next_batch without a batch submitted"
        self.wait(self.num_open)
        batch, _ = self.finish(list(self._jobs))
        return batch

    @property
    def num_open(self) -> int:
        """Prompts that are not answered yet."""
        return len(self._jobs) - len(self._groups)

    @property
    def ended(self) -> dict[int, Group]:
        """What was answered, in the order in which it came, by numbers that count what was submitted."""
        return {number: group for number, (group, _) in self._groups.items()}

    def wait(self, at_least: int) -> None:
        """Until so many more prompts are answered.

        Raises:
            ReplicaDied: as `next_batch`.
            WorkerError: a replica failed, or no answer came for run.deadline.
        """
        goal, deadline = len(self._groups) + min(at_least, self.num_open), self.config.run.deadline
        progress = time.monotonic()
        while len(self._groups) < goal:
            self._send()
            before, wants_all = len(self._groups), goal == len(self._jobs)
            for replica, sent in enumerate(self._sent):
                if sent and replica not in self._takes:
                    is_patient = wants_all and not any(self._queues)
                    many, seconds = (len(sent), TAKE_SECONDS) if is_patient else (1, SHORT_TAKE_SECONDS)
                    self._issue_take(replica, many, seconds)
            left = max(progress + deadline - time.monotonic(), 0)
            done, _ = ray.wait(list(self._takes.values()), num_returns=1, timeout=left)
            for replica in [r for r, ref in self._takes.items() if ref in done]:
                try:
                    self._take(replica)
                except WorkerError as error:
                    if self.embedded or not _is_death(error):
                        raise
                    self._settle()
                    raise ReplicaDied(str(error)) from error
            if len(self._groups) > before:
                progress = time.monotonic()
            elif time.monotonic() >= progress + deadline:
                raise self._no_answer()

    def finish(self, numbers: Sequence[int]) -> tuple[RolloutBatch, list[Job]]:
        """The batch of these groups, in the order of submission. All else is stopped and forgotten.

        Returns:
            the batch, and the jobs that were not answered, with what was begun of them.

        Raises:
            ReplicaDied: as `next_batch`, while they were stopped; nothing is forgotten then.
        """
        chosen, figures = sorted(numbers), self._figures()
        begun = self._stop() if self.num_open else {}
        batch = RolloutBatch([self._groups[number][0] for number in chosen], figures)
        left = [begun.get(number, job) for number, job in self._jobs.items() if number not in self._groups]
        self._jobs, self._groups, self._activities, self._sent_at = {}, {}, [], {}
        return batch, left

    def _route(self, numbers: Sequence[int]) -> None:
        """Line prompts up for the replicas."""
        costs = [self._cost(number) for number in numbers]
        if self.config.rollout.routing == "prefix":
            prompts = [self._jobs[number].prompt.token_ids for number in numbers]
            shares = by_prefix(prompts, costs, len(self.workers))
        else:
            ahead = zip(self._queues, self._sent, strict=True)
            shares = least_loaded(costs, [sum(map(self._cost, (*queue, *sent))) for queue, sent in ahead])
        for queue, share in zip(self._queues, shares, strict=True):
            queue.extend(numbers[i] for i in share)

    def _cost(self, number: int) -> int:
        """Tokens that a job may take."""
        job = self._jobs[number]
        return len(job.prompt.token_ids) + job.num_trajectories * job.sampling.max_new_tokens

    def _send(self) -> None:
        """Give replicas what is lined up for them, as much as they answer together and a little more. One that has run
        out takes from the one that has most waiting."""
        most = self.config.rollout.sglang.max_running_requests
        room = math.inf if self.embedded else most + most / AHEAD
        jobs: list[dict[int, Job]] = [{} for _ in self.workers]
        for steals in (False, True):
            for replica, own in enumerate(self._queues):
                while self._under_way[replica] < room:
                    longest = max(self._queues, key=len)
                    if own:
                        number = own.popleft()
                    elif steals and longest:
                        number = longest.pop()
                    else:
                        break
                    jobs[replica][number] = self._jobs[number]
                    self._under_way[replica] += self._jobs[number].num_trajectories
                    self._sent_since_take[replica] += self._jobs[number].num_trajectories
        now = time.perf_counter()
        for replica, given in enumerate(jobs):
            if given:
                if not self._sent[replica]:
                    self._idle[replica] += now - self._idle_since[replica]
                self._sent_at.update(dict.fromkeys(given, now - self._began))
                self._submits[replica].append(self.workers[replica].submit_jobs.remote(given))
                self._sent[replica].update(given)

    def _issue_take(self, replica: int, at_least: int, seconds: float) -> None:
        self._sent_since_take[replica] = 0
        self._takes[replica] = self.workers[replica].take_groups.remote(at_least, seconds)

    def _take(self, replica: int) -> None:
        """Keep what a replica's call gives, which is under way."""
        refs = [*self._submits[replica], self._takes.pop(replica)]
        results = gather(refs, [self._callees[replica]] * len(refs), "generation", self.config.run.deadline)
        self._submits[replica] = []
        taken: Taken = results[-1]
        self._activities.append(taken.activity)
        self._under_way[replica] = taken.num_open + self._sent_since_take[replica]
        self._keep(replica, taken.groups)

    def _keep(self, replica: int, groups: Mapping[int, Group]) -> None:
        for number, group in groups.items():
            assert number in self._sent[replica], (
                f"prompt {group.infos[0].group} was answered by replica {replica} unasked"
            )
            self._sent[replica].discard(number)
            start = self._sent_at[number]  # from here on seconds count from the first submission
            group = replace(group, ended=tuple(start + end for end in group.ended), scored=start + group.scored)
            self._groups[number] = (group, self.workers[replica])
        if groups and not self._sent[replica]:
            self._idle_since[replica] = time.perf_counter()

    def _forget(self, replica: int) -> None:
        """What a replica was asked has ended, or is lost."""
        self._sent[replica], self._submits[replica], self._under_way[replica] = set(), [], 0
        self._idle_since[replica] = time.perf_counter()

    def _no_answer(self) -> WorkerError:
        waiting = ", ".join(self._where(replica) for replica, sent in enumerate(self._sent) if sent)
        return WorkerError(f"generation: no answer within {self.config.run.deadline:g} s from {waiting} (run.deadline)")

    def _stop(self) -> dict[int, Job]:
        """End what is under way on all replicas; with what was begun. Groups that end meanwhile are kept.

        Raises:
            ReplicaDied: a replica's process is gone, and with it the answers that it held; what the others have begun
                goes on at the next `wait`. Where the engine alone has died, its answers are there still.
        """
        begun: dict[int, Job] = {}
        deaths: list[WorkerError] = []
        for queue in self._queues:
            queue.clear()

        def outlive(replica: int, work: Callable[[], None]) -> None:
            try:
                work()
            except WorkerError as error:
                if self.embedded or not _is_death(error):
                    raise
                deaths.append(error)
                self._forget(replica)

        def take_stopped(replica: int, ref: Any) -> None:
            refs = [*self._submits[replica], ref]
            callees = [self._callees[replica]] * len(refs)
            stopped: Stopped = gather(refs, callees, "stopping generation", self.config.run.deadline)[-1]
            self._keep(replica, stopped.groups)
            begun.update(stopped.jobs)
            self._forget(replica)

        for replica in list(self._takes):
            outlive(replica, functools.partial(self._take, replica))
        busy = [replica for replica, sent in enumerate(self._sent) if sent]
        stops = [self.workers[replica].stop_jobs.remote(self.config.run.deadline) for replica in busy]
        for replica, ref in zip(busy, stops, strict=True):
            outlive(replica, functools.partial(take_stopped, replica, ref))
        for error in deaths:
            if not _has_engine_died(error):
                self._jobs.update(begun)
                self._route([number for number in self._jobs if number not in self._groups])
                raise ReplicaDied(str(error)) from error
        return begun

    def _settle(self) -> None:
        """Wait for all that living replicas still answer, and keep it; the rest is lined up again."""
        lost: list[int] = []
        for replica in range(len(self.workers)):
            lost += self._queues[replica]
            self._queues[replica].clear()
            progress = time.monotonic()
            while self._sent[replica]:
                before = len(self._groups)
                if replica not in self._takes:
                    self._issue_take(replica, len(self._sent[replica]), TAKE_SECONDS)
                try:
                    self._take(replica)
                except WorkerError as error:
                    if not _is_death(error):
                        raise
                    lost += self._sent[replica]
                    self._forget(replica)
                if len(self._groups) > before:
                    progress = time.monotonic()
                elif self._sent[replica] and time.monotonic() >= progress + self.config.run.deadline:
                    raise self._no_answer()
        self._route(sorted(lost))

    def _figures(self) -> RolloutFigures:
        """Of all that has ended since the first submission."""
        end, groups = time.perf_counter(), [group for group, _ in self._groups.values()]
        seconds = max(end - self._began, 1e-9)
        since = zip(self._idle, self._sent, self._idle_since, strict=True)
        idle = [before + (0.0 if sent else end - start) for before, sent, start in since]
        ends = sorted(when for group in groups for when in group.ended)
        tail = ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1] if ends else 0.0
        read, cached = sum(group.num_prompt_tokens for group in groups), sum(group.num_cached for group in groups)
        activity = functools.reduce(operator.add, self._activities, Activity())
        return RolloutFigures(activity, sum(idle) / len(idle) / seconds, tail / seconds, cached / max(read, 1))

    def find_dead(self, patience: float | None = None) -> dict[int, str]:
        """The replicas that do not run any more, and why; asks each of them.

        Args:
            patience: seconds after which one that does not answer is taken to be busy; by default it is dead if it has
                not answered in run.deadline.

        Raises:
            WorkerError: more have died by now than run.max_replica_restarts; with all the reasons.
        """
        if self.embedded:
            return {}
        refs, dead = [worker.heartbeat.remote() for worker in self.workers], {}
        end = time.monotonic() + (self.config.run.deadline if patience is None else patience)
        for replica, (ref, callee) in enumerate(zip(refs, self._callees, strict=True)):
            try:
                (why,) = gather([ref], [callee], "heartbeat", max(end - time.monotonic(), 0.0))
            except WorkerError as error:
                is_busy = patience is not None and error.__cause__ is None
                why = None if is_busy else f"{_first_reason(error)}{self._log_tail(replica)}"
            if why is not None:
                dead[replica] = why
        most = self.config.run.max_replica_restarts
        if dead and len(self._deaths) + len(dead) > most:
            reasons = [*self._deaths, *(f"{self._where(replica)}: {why}" for replica, why in dead.items())]
            raise WorkerError(
                f"{len(reasons)} SGLang replicas have died in this run, more than run.max_replica_restarts = {most}:\n"
                + "\n".join(reasons)
            )
        return dead

    def replace(self, dead: Mapping[int, str]) -> list[str]:
        """Start new replicas in the places of dead ones (see `find_dead`): without weights, and awake. What these had
        answered to batches that are still in flight is to be answered anew.

        Returns:
            for each a message that says which, and why it died.
        """
        assert self._starter is not None, "replicas cannot be started"
        start, most = time.perf_counter(), self.config.run.max_replica_restarts
        self._deaths += [f"{self._where(replica)}: {why}" for replica, why in dead.items()]
        for replica in dead:
            self._retire(replica)
        for replica in dead:
            self.workers[replica] = self._starter.create(replica)
        refs = [self._starter.set_up(replica, self.workers[replica]) for replica in dead]
        callees = [self._callees[replica] for replica in dead]
        gather(refs, callees, "starting SGLang anew", self.config.run.startup_deadline)
        seconds = time.perf_counter() - start
        return [
            f"{self._where(replica)} died and was replaced in {seconds:.0f} s ({len(self._deaths)} of "
            f"run.max_replica_restarts = {most}); what it had not answered is asked again. Why it died: {why}"
            for replica, why in dead.items()
        ]

    def _retire(self, replica: int) -> None:
        """End what is left of a dead replica, and forget the samples that its process holds."""
        worker = self.workers[replica]
        with contextlib.suppress(WorkerError):
            gather([worker.shutdown.remote()], [self._callees[replica]], "engine shutdown", RETIRE_SECONDS)
        ray.kill(worker)
        lost = [number for number, (_, holder) in self._groups.items() if holder is worker]
        for number in lost:
            del self._groups[number]
        self._route(lost)

    def _where(self, replica: int) -> str:
        return f"{self._callees[replica].name} on {self._callees[replica].host}"

    def _log_tail(self, replica: int) -> str:
        """Of a replica whose process cannot say it, where the driver sees the file."""
        logs = self._starter.logs if self._starter is not None else ()
        return log_tail(logs[replica], DEATH_LINES) if logs else ""

    def sleep(self) -> None:
        """Give the weights' and the KV cache's memory back for training; no answer may be in flight. An engine on GPUs
        of its own keeps it. One that has died has given it back.

        Raises:
            WorkerError: a replica's process is gone too, and with it the answers that it held.
        """
        assert not any(self._sent), "sleep with answers in flight"
        try:
            self._all("engine sleep", "sleep")
        except WorkerError:
            for worker, callee in zip(self.workers, self._callees, strict=True):
                try:
                    gather([worker.sleep.remote()], [callee], "engine sleep", self.config.run.deadline)
                except WorkerError as error:
                    if not _has_engine_died(error):
                        raise

    def wake_weights(self) -> None:
        """Take memory for the weights; their content is gone and comes by sync."""
        self._all("engine wake", "wake", ("weights",))

    def resume(self) -> None:
        """Take memory for the KV cache where `sleep` gave it back, and forget what was cached under earlier weights."""
        self._all("engine wake", "wake", ("kv_cache",))
        self._all("engine cache flush", "flush_cache")

    def parameters(self) -> list[list[dict[str, tuple[tuple[int, ...], str]]]]:
        """Per replica and tensor-parallel rank, (shape, type) of the engine's own parameters."""
        return self._all("reading the engine's parameters", "parameters")

    def start_sync(
        self, number: int, sockets: Sequence[str], version: int, deadline: float
    ) -> list[tuple[Any, Callee]]:
        """Have every replica take the weights of sync `number`, while the trainers send them; returns at once.

        Args:
            sockets: of each target rank's channel.

        Returns:
            per replica the call and whom it goes to; it gives a LoadReport for each tensor-parallel rank.
        """
        size = self.config.rollout.tensor
        return [
            (worker.sync.remote(number, list(sockets[i * size : (i + 1) * size]), version, deadline), callee)
            for i, (worker, callee) in enumerate(zip(self.workers, self._callees, strict=True))
        ]

    def set_version(self, version: int) -> None:
        """Stamp the weights' version: every answer carries it."""
        self._all("stamping the version", "set_version", version)

    def shutdown(self) -> None:
        if not self.embedded:
            self._all("engine shutdown", "shutdown")

    def _all(self, stage: str, method: str, *arguments: Any) -> list[Any]:
        keeps_memory = self.embedded or self.config.rollout.num_gpus > 0
        if (keeps_memory and method in ("sleep", "wake")) or (self.embedded and method == "flush_cache"):
            return []
        refs = [getattr(w, method).remote(*arguments) for w in self.workers]
        return gather(refs, self._callees, stage, self.config.run.deadline)


def _is_death(error: WorkerError) -> bool:
    """Whether a call failed because the replica's process, or a process of its engine, has ended."""
    cause = error.__cause__
    is_gone = isinstance(cause, RayActorError) and not isinstance(cause, ActorUnavailableError)
    return is_gone or _has_engine_died(error)


def _first_reason(error: WorkerError) -> str:
    """What Ray says of a process that is gone, without the rest."""
    if not isinstance(error.__cause__, RayActorError):
        return str(error)
    found = re.search(r"Worker exit detail: ([^\n]*)", str(error.__cause__))
    return "its process died" + (f": {found[1]}" if found else "")


def _has_engine_died(error: WorkerError) -> bool:
    """Whether the replica's process says that its engine has ended."""
    return isinstance(getattr(error.__cause__, "cause", None), EngineDied)
