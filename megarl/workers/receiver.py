"""The process on a GPU that is the engine's own: it ends the weight exchange there, and hands the weights to SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.config import Config
from megarl.parallel import device
from megarl.reshard.layout import Layout
from megarl.workers import placement, weights
from megarl.workers.calls import Callee, gather
from megarl.workers.placement import Placement, Seat


class ReceiverWorker:
    """The process of one engine rank. It holds its two buckets and its communicator, and nothing else."""

    def where(self, bundle: int) -> Seat:
        return placement.here(bundle)

    def setup(self, config: Config, rank: int, gpu: int | None) -> None:
        """
        Args:
            rank: as `weights.SyncTerms` counts processes: after the trainer ranks.
        """
        device.set_device(gpu or 0)
        self._config = config
        self._syncs = weights.SyncMember(config, rank, device.device())

    def prepare_sync(self, source: Layout, terms: weights.SyncTerms) -> weights.Facts:
        """Plan the sync from the actor's layout; every process makes the same plan."""
        return self._syncs.prepare(source, terms)

    def sync(self, number: int, version: int, deadline: float) -> weights.SyncReport:
        """Sync `number`: receive for this rank's loader."""
        return self._syncs.sender.sync(number, {}, None, self._config.sync.verify, deadline)

    def lost_replicas(self) -> set[int]:
        """Replicas that could not be synced, whose communicator is to be made anew."""
        return self._syncs.lost()


class Receivers:
    """The receivers on all GPUs of the engine's own, in the order of its ranks. Make them with `start`."""

    def __init__(self, config: Config, placed: Placement) -> None:
        self._config, self._placed = config, placed
        self.actors = [self._start(bundle) for bundle in placed.engine]
        self.seats: list[Seat] = []

    @classmethod
    def start(cls, config: Config, placed: Placement) -> Receivers:
        """Start one in each of the engine's bundles."""
        made = cls(config, placed)
        refs = [actor.where.remote(bundle) for actor, bundle in zip(made.actors, placed.engine, strict=True)]
        callees = [Callee(f"receiver of engine rank {i}", "its node") for i in range(len(refs))]
        made.seats = gather(refs, callees, "starting receivers", config.run.startup_deadline)
        made._set_up(range(len(refs)))
        return made

    @property
    def callees(self) -> list[Callee]:
        return [
            Callee(f"receiver of engine rank {i}{placement.on_gpus([seat])}", seat.host)
            for i, seat in enumerate(self.seats)
        ]

    def replace_dead(self) -> list[int]:
        """Start those anew whose process has died; their engine ranks."""
        dead = []
        for index, (actor, seat) in enumerate(zip(self.actors, self.seats, strict=True)):
            try:
                ray.get(actor.where.remote(seat.bundle), timeout=self._config.run.deadline)
            except RayError:
                dead.append(index)
        for index in dead:
            ray.kill(self.actors[index])
            self.actors[index] = self._start(self.seats[index].bundle)
        self._set_up(dead)
        return dead

    def _start(self, bundle: int) -> Any:
        placed = self._placed
        options = placement.actor_options(placed.bundles, bundle, placement.RECEIVER_SHARE, placed.variables)
        return ray.remote(ReceiverWorker).options(**options).remote()

    def _set_up(self, indices: Sequence[int]) -> None:
        first, callees = self._config.cluster.num_ranks, self.callees
        refs = [self.actors[i].setup.remote(self._config, first + i, self.seats[i].gpu) for i in indices]
        gather(refs, [callees[i] for i in indices], "starting receivers", self._config.run.startup_deadline)
