"""The sync of the actor's weights into the rollout engine: planned once, executed bucket by bucket, verified every
time."""

from __future__ import annotations

import time
from typing import Any

from megarl.config import Config
from megarl.driver.rollout import Rollout
from megarl.model.families import declare
from megarl.model.role_layout import role_layout
from megarl.reshard.checksum import compare, tensor_checksums
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import hf_layout, sglang_layout
from megarl.workers.group import TrainerGroup
from megarl.workers.weights import checksum_regions, compare_parameters, wire_dtype

SGLANG_VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)."""


class WeightSync:
    """Moves weights and checks that they arrived. `prepare` plans and compares names; `run` executes."""

    def __init__(self, config: Config, group: TrainerGroup, rollout: Rollout, hf_config: Any) -> None:
        self.config, self.group, self.rollout = config, group, rollout
        declaration = declare(hf_config)
        # Here for its canonical tensors and rectangles only, which do not depend on how Megatron names its norms.
        self._source = role_layout(
            "actor", hf_config, config.actor.parallel, config.cluster.num_ranks, fused_norms=False
        )
        if rollout.embedded:
            self._target = hf_layout(declaration, config.cluster.num_ranks)
        else:
            self._target = sglang_layout(declaration, config.rollout.tensor, config.num_replicas, SGLANG_VOCAB_MULTIPLE)
        self.num_buckets = 0
        self.summary = ""

    def prepare(self) -> None:
        """Plan on every rank and compare the plan's parameters with the engine's own.

        Raises:
            ValueError: a parameter that the engine has and the plan lacks, or the other way round, or of another shape.
        """
        if not self.rollout.embedded:
            self._check_engine()
        # Colocated: target rank r shares its GPU with trainer rank r, which receives for it.
        hosts = list(range(self._target.num_ranks))
        facts = self.group.call("planning the weight sync", "prepare_sync", self._target, hosts)
        self.num_buckets, self.summary = facts[0]["num_buckets"], facts[0]["summary"]

    def run(self, version: int) -> dict[str, float]:
        """Move the weights, verify them, stamp the version. Returns seconds by part.

        Raises:
            ValueError: what the engine holds afterwards is not what the actor has; names the tensors.
        """
        start = time.perf_counter()
        for bucket in range(self.num_buckets):
            payloads = self.group.call("weight exchange", "sync_bucket", bucket)
            if not self.rollout.embedded:
                merged = {target: payload for rank in payloads for target, payload in rank.items()}
                self.rollout.load_bucket([merged.get(t, b"") for t in range(self._target.num_ranks)])
        moved = time.perf_counter()
        if self.config.sync.verify == "checksum":
            self._verify()
        if self.rollout.embedded:
            self.group.call("stamping the version", "set_version", version)
        else:
            self.rollout.set_version(version)
        end = time.perf_counter()
        return {"timing_s/sync_move": moved - start, "timing_s/sync_verify": end - moved}

    def _verify(self) -> None:
        found = self.group.call("reading weights back", "sync_checksums")
        expected = tensor_checksums(self._source, {rank: source for rank, (source, _) in enumerate(found)})
        if self.rollout.embedded:
            actual = {target: sums for _, targets in found for target, sums in targets.items()}
        else:
            regions = [checksum_regions(self._target, t) for t in range(self.config.rollout.tensor)]
            actual = dict(enumerate(self.rollout.checksums(regions)))
        for replica, ranks in _replicas(self._target).items():
            own = tensor_checksums(self._target, {r: actual[r] for r in ranks})
            compare(expected, own, f"rollout replica {replica}")

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


def _replicas(layout: Layout) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, replica in enumerate(layout.replica_of):
        ranks.setdefault(replica, []).append(rank)
    return ranks
