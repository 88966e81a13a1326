"""The trainer processes as one: calls go to all ranks together, arguments scattered by data-parallel rank, results
gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from megarl.config import Config
from megarl.parallel.topology import RankGrid
from megarl.reshard.plan import Place
from megarl.workers import placement
from megarl.workers.calls import Callee, gather
from megarl.workers.messages import ForwardResult, Retokenised, UpdatePlan, WhitenedResult
from megarl.workers.placement import Seat
from megarl.workers.trainer import TrainerWorker

PerData = Sequence[Any]
"""One value for each data-parallel rank of a role."""


class TrainerGroup:
    """All trainer processes. Make it with `start`."""

    def __init__(self, config: Config, actors: Sequence[Any], seats: Sequence[Seat]) -> None:
        self.config, self.actors, self.seats = config, list(actors), list(seats)
        self.grids = {role: RankGrid(config.cluster.num_ranks, parallel) for role, parallel in config.roles().items()}
        self._callees = [Callee(f"trainer rank {rank}", seat.host) for rank, seat in enumerate(seats)]

    @classmethod
    def start(cls, config: Config, placed: placement.Placement) -> TrainerGroup:
        """Start the processes, order them by (node, GPU), and join them in torch.distributed."""
        deadline = config.run.startup_deadline
        remote = ray.remote(TrainerWorker)
        options = [
            placement.actor_options(placed.bundles, bundle, placement.TRAINER_SHARE, placed.variables)
            for bundle in placed.trainers
        ]
        actors = [remote.options(**own).remote() for own in options]
        callees = [Callee(f"trainer process {i}", "its node") for i in range(len(actors))]
        seats = gather(
            [actor.where.remote(bundle) for actor, bundle in zip(actors, placed.trainers, strict=True)],
            callees,
            "starting trainer processes",
            deadline,
        )
        order = sorted(
            range(len(actors)),
            key=lambda i: (seats[i].node, seats[i].gpu if seats[i].gpu is not None else i, seats[i].gpu_uuid),
        )
        group = cls(config, [actors[i] for i in order], [seats[i] for i in order])
        address = group.address
        (port,) = gather([group.actors[0].free_port.remote(address)], group._callees[:1], "finding a port", deadline)
        master = f"tcp://{address}:{port}"
        refs = [a.setup.remote(config, r, group.seats[r].gpu, group.places, master) for r, a in enumerate(group.actors)]
        group._gather("joining torch.distributed", refs, deadline)
        return group

    @property
    def places(self) -> tuple[Place, ...]:
        """Each rank's place, for plans."""
        return placement.places(self.seats)

    @property
    def address(self) -> str:
        """At which all ranks reach rank 0."""
        return placement.common_address(self.seats)

    # -------------------------------------------------------------------------------------------- calling

    def call(self, stage: str, method: str, *arguments: Any, deadline: float | None = None) -> list[Any]:
        """Call a method of every rank with the same arguments."""
        return self._gather(stage, [getattr(a, method).remote(*arguments) for a in self.actors], deadline)

    def call_by_data(
        self, stage: str, role: str, method: str, *per_data: PerData, before: tuple[Any, ...] = ()
    ) -> list[Any]:
        """Call a method of every rank, each with its data-parallel rank's arguments.

        Args:
            per_data: for each argument, one value a data-parallel rank of the role.
            before: arguments that are the same for all and come first.
        """
        grid = self.grids[role]
        refs = []
        for rank, actor in enumerate(self.actors):
            data = grid.coordinates(rank).data
            refs.append(getattr(actor, method).remote(*before, *(values[data] for values in per_data)))
        return self._gather(stage, refs)

    def outputs(self, role: str, results: Sequence[Any]) -> list[Any]:
        """Of the results of all ranks those of the output rank of each data-parallel rank."""
        grid = self.grids[role]
        return [results[grid.output_rank(data)] for data in range(grid.data_parallel_size)]

    def _gather(self, stage: str, refs: Sequence[Any], deadline: float | None = None) -> list[Any]:
        return gather(refs, self._callees, stage, deadline or self.config.run.deadline)

    # -------------------------------------------------------------------------------------------- a step

    def begin_step(
        self, handles: Mapping[int, tuple[Any, int]], assignments: Mapping[str, PerData]
    ) -> dict[str, float]:
        """Tell every rank which samples it holds: those of its data-parallel rank in each role. Returns the memory in
        use of the fullest GPU while the engine sleeps."""
        refs = []
        for rank, actor in enumerate(self.actors):
            wanted = {
                i for role, per_data in assignments.items() for i in per_data[self.grids[role].coordinates(rank).data]
            }
            refs.append(actor.begin_step.remote({i: handles[i] for i in sorted(wanted)}))
        used = [found for found in self._gather("fetching samples", refs) if found is not None]
        return {"perf/gpu_used_asleep_gb": max(used)} if used else {}

    def forward(self, role: str, micro_batches: PerData) -> list[ForwardResult]:
        """Forward-only pass; one result a data-parallel rank."""
        results = self.call_by_data(f"{role} forward", role, "forward", micro_batches, before=(role,))
        return self.outputs(role, results)

    def retokenise(self, indices: PerData) -> list[Retokenised]:
        """Make the reward model's tokens of its samples, where they are; one result a data-parallel rank."""
        role = "reward_model"
        return self.outputs(role, self.call_by_data("tokenising for the reward model", role, "retokenise", indices))

    def score(self, micro_batches: PerData) -> list[dict[int, float]]:
        """The reward model's score of each sample, by its index; one result a data-parallel rank."""
        role = "reward_model"
        return self.outputs(role, self.call_by_data(f"{role} forward", role, "score", micro_batches))

    def rescore(self, indices: PerData, scores: PerData) -> None:
        """Give the actor's ranks the scores of their samples that advantages are computed from."""
        self.call_by_data("moving scores", "actor", "rescore", indices, scores)

    def receive(self, role: str, name: str, indices: PerData, refs: Sequence[Any]) -> None:
        self.call_by_data(f"moving {name}", role, "receive", indices, [refs] * len(indices), before=(name,))

    def advantages(self, indices: PerData, kl_coef: float, sample_advantages: PerData) -> list[Any]:
        results = self.call_by_data(
            "advantages", "actor", "advantages", indices, [kl_coef] * len(indices), sample_advantages
        )
        return self.outputs("actor", results)

    def whiten(self, indices: PerData, moments: Any) -> list[WhitenedResult]:
        return self.outputs(
            "actor", self.call_by_data("advantages", "actor", "whiten", indices, [moments] * len(indices))
        )

    def update(self, role: str, plans: Sequence[UpdatePlan]) -> dict[str, float]:
        """Optimizer steps of a role; metrics are the same on every rank."""
        return self.call_by_data(f"{role} update", role, "update", plans, before=(role,))[0]

    def memory(self) -> dict[str, float]:
        """The largest of each figure over the ranks."""
        found = self.call("reading memory", "memory")
        return {name: max(one[name] for one in found) for name in found[0]}

    def shutdown(self) -> None:
        """End the processes."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
