"""The sync of the actor's weights into the rollout engine: planned once, one call to each process every time, verified
every time."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.config import Config
from megarl.driver.rollout import DEATH_PATIENCE, Rollout
from megarl.model.role_layout import engine_layout, role_layout
from megarl.reshard import channel
from megarl.reshard.channel import UNVERIFIED, WENT_AWAY, LoadReport
from megarl.reshard.checksum import TensorChecksums, compare
from megarl.reshard.layout import Layout
from megarl.reshard.plan import Summary
from megarl.workers import placement
from megarl.workers.calls import ECHOES, Callee, WorkerError, gather
from megarl.workers.group import TrainerGroup
from megarl.workers.placement import Seat
from megarl.workers.receiver import Receivers
from megarl.workers.weights import SyncReport, SyncTerms, compare_parameters, wire_dtype

DEADLINE_SHARE = 0.9
"""Of run.deadline: trainers and loaders give up before the driver does, and say where they were."""

PATIENCE = 3.0
"""Seconds in which a better error may come than that the other side went away."""


class WeightSync:
    """Moves weights and checks that they arrived. `prepare` plans and compares names; `run` executes."""

    def __init__(
        self, config: Config, group: TrainerGroup, rollout: Rollout, hf_config: Any, receivers: Receivers | None = None
    ) -> None:
        """
        Args:
            receivers: on the engine's own GPUs; None where it shares the trainers'.
        """
        self.config, self.group, self.rollout, self.receivers = config, group, rollout, receivers
        # Here for its canonical tensors and rectangles only, which do not depend on how Megatron names its norms.
        self._source = role_layout(
            "actor", hf_config, config.actor.parallel, config.cluster.num_ranks, fused_norms=False
        )
        self._target = engine_layout(config, hf_config)
        self.num_buckets = 0
        self.summary: Summary | None = None
        self._number = 0
        self._sockets: dict[int, str] = {}
        self._generations: Counter[int] = Counter()
        self._source_checksums = TensorChecksums(self._source, range(self._source.num_ranks))
        self._target_checksums = [TensorChecksums(self._target, ranks) for ranks in _replicas(self._target).values()]

    def prepare(self) -> None:
        """Plan in every process and compare the plan's parameters with the engine's own. Called again after a failure,
        it starts dead receivers anew, and makes the communicators of replicas that were lost anew; others stay.

        Raises:
            ValueError: a parameter that the engine has and the plan lacks, or the other way round, or of another shape.
        """
        if not self.rollout.embedded:
            self._check_engine()
        if self.summary is not None:
            self._count_lost()
        terms, stage, waiting = self._terms(), "planning the weight sync", []
        if self.receivers is not None:
            source = self.group.actors[0].layout.remote("actor")
            waiting = [actor.prepare_sync.remote(source, terms) for actor in self.receivers.actors]
        facts = self.group.call(stage, "prepare_sync", terms)
        if self.receivers is not None:
            facts += gather(waiting, self.receivers.callees, stage, self.config.run.deadline)
        self.num_buckets, self.summary = facts[0].num_buckets, facts[0].summary
        self._sockets = {target: path for own in facts for target, path in own.sockets.items()}

    def _terms(self) -> SyncTerms:
        """Colocated, target rank r shares its GPU with trainer rank r, which receives for it."""
        first, seats = 0, list(self.group.seats)
        if self.receivers is not None:
            first, seats = len(seats), [*seats, *self.receivers.seats]
        hosts = range(first, first + self._target.num_ranks)
        places = placement.places(seats)
        return SyncTerms(
            self._target,
            tuple(hosts),
            tuple(map(self._name, range(self._target.num_ranks))),
            places[: len(self.group.seats)],
            places[hosts.start : hosts.stop],
            None if self.rollout.embedded or len(seats) == 1 else self._store(seats),
            dict(self._generations),
        )

    def _store(self, seats: Sequence[Seat]) -> tuple[str, int]:
        """Where the communicators meet: trainer rank 0 serves it."""
        address = placement.common_address(seats)
        callee = Callee("trainer rank 0", seats[0].host)
        (port,) = gather(
            [self.group.actors[0].open_store.remote(address)], [callee], "opening a store", self.config.run.deadline
        )
        return address, port

    def _count_lost(self) -> None:
        """Replicas that a process could not sync, or whose receiver has died, get a new communicator."""
        stage, lost = "finding lost replicas", set()
        if self.receivers is not None:
            lost |= {rank // self.config.rollout.tensor for rank in self.receivers.replace_dead()}
            refs = [actor.lost_replicas.remote() for actor in self.receivers.actors]
            lost |= set().union(*gather(refs, self.receivers.callees, stage, self.config.run.deadline))
        lost |= set().union(*self.group.call(stage, "lost_replicas"))
        self._generations.update(lost)

    def run(self, version: int) -> dict[str, float]:
        """Move the weights and their version, and verify them. Returns seconds by part: sync_move until the last bucket
        is in the engine, sync_verify for what follows.

        Raises:
            WorkerError: a process failed; the first real reason.
            ValueError: what the engine holds afterwards is not what the actor has; names the tensors.
        """
        start = time.perf_counter()
        self._number += 1
        sent, loaded = self._move(version)
        arrived = time.perf_counter()
        if self.config.sync.verify != "off":
            try:
                self._verify(sent, loaded)
            except ValueError:
                self._stamp(UNVERIFIED)
                raise
        end = time.perf_counter()
        seconds = [report.verify_seconds for report in sent] + [report.verify_seconds for report in loaded.values()]
        verified = min(max(seconds) + end - arrived, end - start)
        return {"timing_s/sync_move": end - start - verified, "timing_s/sync_verify": verified}

    def _move(self, version: int) -> tuple[list[SyncReport], dict[int, LoadReport]]:
        """One call to each trainer and each replica, all at once. Returns the trainers' reports, and the engine's by
        target rank."""
        deadline = DEADLINE_SHARE * self.config.run.deadline
        if self.rollout.embedded:
            sent = self.group.call("weight sync", "sync", self._number, version, deadline)
            return sent, {target: one for report in sent for target, one in report.loaded.items()}
        sockets = [self._sockets[target] for target in range(self._target.num_ranks)]
        engines = self.rollout.start_sync(self._number, sockets, version, deadline)
        trainers = [
            (actor.sync.remote(self._number, version, deadline), Callee(f"trainer rank {rank}", seat.host))
            for rank, (actor, seat) in enumerate(zip(self.group.actors, self.group.seats, strict=True))
        ]
        between = []
        if self.receivers is not None:
            between = [
                (actor.sync.remote(self._number, version, deadline), callee)
                for actor, callee in zip(self.receivers.actors, self.receivers.callees, strict=True)
            ]
        calls = [*trainers, *between, *engines]
        try:
            results = gather_both(calls, "weight sync", self.config.run.deadline)
        except WorkerError:
            if self._give_up():
                for ref, callee in calls:  # the run may go on: nobody is to be in this sync any more
                    with contextlib.suppress(WorkerError):
                        gather([ref], [callee], "weight sync", self.config.run.deadline)
            raise
        sent: list[SyncReport] = results[: len(trainers)]
        for report, (_, callee) in zip(sent, trainers, strict=True):
            for why in report.lost.values():
                raise WorkerError(f"weight sync: {callee.name} on {callee.host}: {why}")
        loaded = [one for replica in results[len(trainers) + len(between) :] for one in replica]
        return sent, dict(enumerate(loaded))

    def _give_up(self) -> bool:
        """Tell the hosts of dead replicas that nobody will come for this sync: a replica's process that has died cannot
        say it, and its host would wait for the deadline. The sockets are files of the host's node. Returns whether
        there are dead ones."""
        dead = self.rollout.find_dead(DEATH_PATIENCE)
        seats, size = (self.receivers or self.group).seats, self.config.rollout.tensor
        variables = {"env_vars": placement.environment(self.config.cluster)}
        remote, refs, callees = ray.remote(max_calls=1)(channel.give_up), [], []
        for target in (replica * size + rank for replica in dead for rank in range(size)):
            node = NodeAffinitySchedulingStrategy(seats[target].node, soft=False)
            own = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=node, runtime_env=variables)
            refs.append(own.remote(self._sockets[target], self._number, "it has died"))
            callees.append(Callee("a task", seats[target].host))
        with contextlib.suppress(WorkerError):
            gather(refs, callees, "giving up a sync", self.config.run.deadline)
        return bool(dead)

    def _verify(self, sent: Sequence[SyncReport], loaded: Mapping[int, LoadReport]) -> None:
        for target, report in loaded.items():
            if report.num_different:
                more = report.num_different - len(report.differences)
                raise ValueError(
                    f"weights of {self._name(target)} differ from those sent in {report.num_different} parameters: "
                    + "; ".join(map(str, report.differences))
                    + (f" and {more} more" if more else "")
                )
        expected = self._source_checksums.of({rank: report.sums for rank, report in enumerate(sent)})
        for replica, checksums in enumerate(self._target_checksums):
            own = checksums.of({rank: loaded[rank].sums for rank in checksums.ranks})
            compare(expected, own, f"rollout replica {replica}")

    def _stamp(self, version: int) -> None:
        if self.rollout.embedded:
            self.group.call("stamping the version", "set_version", version)
        else:
            self.rollout.set_version(version)

    def _name(self, target: int) -> str:
        if self.rollout.embedded:
            return f"hf engine of trainer rank {target}"
        name = "SGLang tensor rank {1} of replica {0}".format(*divmod(target, self.config.rollout.tensor))
        if self.receivers is None:
            return name
        seat = self.receivers.seats[target]
        return f"{name}{placement.on_gpus([seat])} on {seat.host}"

    def _check_engine(self) -> None:
        dtype = str(wire_dtype(self.config)).removeprefix("torch.")
        for replica, ranks in enumerate(self.rollout.parameters()):
            for rank, found in enumerate(ranks):
                where = f"SGLang replica {replica}, tensor rank {rank}"
                target_rank = replica * self.config.rollout.tensor + rank
                planned = {name: tuple(shape) for name, shape in self._target.shard(target_rank).parameters.items()}
                compare_parameters(planned, {name: shape for name, (shape, _) in found.items()}, where)
                for name, (_, own) in found.items():
                    if own != dtype:
                        raise ValueError(
                            f"{where}: parameter {name} is {own}, but the weights come as {dtype} (model.precision)"
                        )


def gather_both(calls: Sequence[tuple[Any, Callee]], stage: str, deadline: float) -> list[Any]:
    """The results of calls to two sides that wait for each other.

    Raises:
        WorkerError: as `gather`. That the other side went away is said only if the other side does not say why.
    """
    refs, callees = [ref for ref, _ in calls], [callee for _, callee in calls]
    try:
        return gather(refs, callees, stage, deadline)
    except WorkerError as error:
        if _is_echo(error):
            _raise_better(refs, callees, stage)
        raise


def _raise_better(refs: Sequence[Any], callees: Sequence[Callee], stage: str) -> None:
    """Raise the first error that says more than that another process went away, if one comes in time."""
    pending, end = dict(zip(refs, callees, strict=True)), time.monotonic() + PATIENCE
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(end - time.monotonic(), 0))
        if not done:
            return
        try:
            gather(done, [pending.pop(done[0])], stage, 0.0)
        except WorkerError as error:
            if not _is_echo(error):
                raise


def _is_echo(error: WorkerError) -> bool:
    """Whether a worker says only that another one is gone."""
    return any(words in str(error) for words in (WENT_AWAY, *ECHOES))


def _replicas(layout: Layout) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, replica in enumerate(layout.replica_of):
        ranks.setdefault(replica, []).append(rank)
    return ranks
