"""The rollout as the loop sees it: submit prompts, take the batch when its answers have ended, sleep while training,
resume."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from megarl.config import Config
from megarl.engines.sglang import DEATH_LINES, EngineDied, log_tail
from megarl.types import Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee, WorkerError, gather
from megarl.workers.generation import Group, Job

RETIRE_SECONDS = 60.0
"""For a dead replica's process to clean up behind itself, before it is killed."""


DEATH_PATIENCE = 10.0
"""Seconds in which a replica that has died is found out, while others are busy."""


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
class _Call:
    """A replica's share of a batch's jobs."""

    replica: int
    worker: Any
    jobs: list[int]
    ref: Any


@dataclass
class _Flight:
    """A batch that was submitted: its jobs by number, the calls under way, and what was answered, by whom."""

    jobs: list[Job]
    with_texts: bool
    calls: list[_Call] = field(default_factory=list)
    groups: dict[int, tuple[Group, Any]] = field(default_factory=dict)
    """By job; with the process that holds its samples."""


class RolloutBatch:
    """A step's samples, numbered from 0 in the order of their prompts; the driver holds scalars and references."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.infos: list[SampleInfo] = [info for group in groups for info in group.infos]
        self.texts: list[tuple[str, str]] = [text for group in groups for text in group.texts]
        last = max((group.seconds for group in groups), key=lambda s: s[1], default=(0.0, 0.0))
        self.reward_seconds = last[1] - last[0]
        """For which the step waited for scores: from the last answer's end, on the replica that was done last."""
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
        self._in_flight: list[_Flight] = []

    def submit(
        self,
        prompts: Sequence[Prompt],
        num_answers: int,
        sampling: SamplingParams,
        seed: int,
        reward: str,
        with_texts: bool = False,
    ) -> None:
        """Start generation of `num_answers` answers to each prompt on all replicas; returns at once. `reward` is the
        name of the function that scores them."""
        jobs = [Job(prompt, num_answers, sampling, seed, reward) for prompt in prompts]
        self._in_flight.append(_Flight(jobs, with_texts))
        self._send(self._in_flight[-1])

    def next_batch(self) -> RolloutBatch:
        """The batch that was submitted first, in the order of its prompts, when all its answers have ended and are
        scored.

        Raises:
            ReplicaDied: before they had; `replace` the dead, sync, and call this again.
        """
        assert self._in_flight, "next_batch without a batch submitted"
        flight = self._in_flight[0]
        if not flight.calls:
            self._send(flight)
        refs, callees = [call.ref for call in flight.calls], [self._callees[call.replica] for call in flight.calls]
        try:
            results = gather(refs, callees, "generation", self.config.run.deadline)
        except WorkerError as error:
            if self.embedded or not _is_death(error):
                raise
            self._settle()
            raise ReplicaDied(str(error)) from error
        _take(flight, results)
        self._in_flight.pop(0)
        return RolloutBatch([flight.groups[number][0] for number in range(len(flight.jobs))])

    def _send(self, flight: _Flight) -> None:
        """Ask for what is not answered yet, in equal shares."""
        missing = [number for number in range(len(flight.jobs)) if number not in flight.groups]
        flight.calls = []
        for replica, part in enumerate(np.array_split(missing, len(self.workers))):
            if len(part):
                own, worker = [int(number) for number in part], self.workers[replica]
                ref = worker.generate.remote([flight.jobs[number] for number in own], flight.with_texts)
                flight.calls.append(_Call(replica, worker, own, ref))

    def _settle(self) -> None:
        """Wait for all that living replicas still answer, and keep it."""
        for flight in self._in_flight:
            for call in flight.calls:
                try:
                    results = gather([call.ref], [self._callees[call.replica]], "generation", self.config.run.deadline)
                except WorkerError as error:
                    if not _is_death(error):
                        raise
                else:
                    _keep(flight, call, results[0])
            flight.calls = []

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
        for flight in self._in_flight:
            flight.groups = {number: kept for number, kept in flight.groups.items() if kept[1] is not worker}

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
        assert not any(flight.calls for flight in self._in_flight), "sleep with answers in flight"
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


def _take(flight: _Flight, results: Sequence[Sequence[Group]]) -> None:
    for call, groups in zip(flight.calls, results, strict=True):
        _keep(flight, call, groups)
    flight.calls = []


def _keep(flight: _Flight, call: _Call, groups: Sequence[Group]) -> None:
    for number, group in zip(call.jobs, groups, strict=True):
        assert number not in flight.groups, f"prompt {flight.jobs[number].prompt.uid} was answered twice"
        flight.groups[number] = (group, call.worker)


def _is_death(error: WorkerError) -> bool:
    """Whether a call failed because the replica's process, or a process of its engine, has ended."""
    return isinstance(error.__cause__, RayActorError) or _has_engine_died(error)


def _first_reason(error: WorkerError) -> str:
    """What Ray says of a process that is gone, without the rest."""
    if not isinstance(error.__cause__, RayActorError):
        return str(error)
    found = re.search(r"Worker exit detail: ([^\n]*)", str(error.__cause__))
    return "its process died" + (f": {found[1]}" if found else "")


def _has_engine_died(error: WorkerError) -> bool:
    """Whether the replica's process says that its engine has ended."""
    return isinstance(getattr(error.__cause__, "cause", None), EngineDied)
