"""A trainer process's part in moving weights: loading, the sync to the rollout engine, saving a Hugging Face folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.model.families import VALUE_HEAD, declare, declare_role
from megarl.model.hf_config import DTYPES
from megarl.reshard import channel, hf_files
from megarl.reshard.channel import Channel, ChannelDelivery, LoadReport, LocalDelivery, Setup, Target, deliver
from megarl.reshard.checksum import piece_regions
from megarl.reshard.communicator import Communicators, memberships
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, as_matrix
from megarl.reshard.layouts import hf_layout
from megarl.reshard.plan import Place, ReshardPlan, Summary, plan
from megarl.reshard.regions import RegionSums
from megarl.reshard.transports import BucketRegion, ChecksumRegion, dtype_name

MAX_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class SyncTerms:
    """What all processes of a sync agree on. They are numbered: the trainer ranks, then the receivers on GPUs that are
    the engine's own."""

    target: Layout
    hosts: tuple[int, ...]
    """Per target rank the process on its GPU, which receives for it."""
    names: tuple[str, ...]
    """Of the target ranks, for errors."""
    source_places: tuple[Place, ...]
    target_places: tuple[Place, ...]
    store: tuple[str, int] | None = None
    """Address and port of the store at which communicators meet; None where none is needed."""
    generations: Mapping[int, int] = field(default_factory=dict)
    """By replica, how often its communicator was made anew."""

    def plan(self, source: Layout, config: Config) -> ReshardPlan:
        """The plan; every process makes the same one."""
        itemsize, bucket_bytes = wire_dtype(config).itemsize, config.sync.bucket_mb * 2**20
        return plan(source, self.target, itemsize, self.source_places, self.target_places, bucket_bytes)


@dataclass(frozen=True)
class SyncReport:
    """What a trainer rank, or a receiver, says of a sync."""

    sums: list[int]
    """Checksums of its pieces of the source layout; empty with verify=off."""
    loaded: dict[int, LoadReport]
    """By target rank, what an embedded engine of this process holds."""
    verify_seconds: float
    """From the last bucket's exchange to the last sum."""
    lost: dict[int, str] = field(default_factory=dict)
    """By replica that this rank could not send all its weights to, the reason."""


@dataclass(frozen=True)
class Facts:
    """What a process says of the plan that it made."""

    num_buckets: int
    summary: Summary | None
    """Process 0's only: it takes longer than the plan."""
    sockets: dict[int, str]
    """By target rank that this process hosts, where its loader asks for weights."""


class WeightSender:
    """A rank's part in each sync: it sends its actor's weights, and receives for the engine ranks that it hosts."""

    def __init__(
        self,
        plan: ReshardPlan,
        dtype: torch.dtype,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        names: Sequence[str] | None,
        group: Any = None,
    ) -> None:
        """
        Args:
            rank: in `group`; a process that is no source rank only receives (see `Executor`).
            names: of the target ranks, for errors; None if the engine is embedded in this process.
            group: all processes that take part, see `executor.exchange_messages`; or this process's `Communicators`.
        """
        self._executor = Executor(plan, dtype, rank, hosts, device, group)
        self._communicators = group if isinstance(group, Communicators) else None
        self.lost: set[int] = set()
        """Replicas for whose ranks this process received in vain."""
        self._plan, self._dtype, self._rank = plan, dtype, rank
        self._channels: dict[int, Channel] = {}
        self._embedded: dict[int, Target] = {}
        for target in self._executor.targets():
            buckets, checksums = self._buckets(target), checksum_regions(plan.target, target)
            if names is None:
                buffer = self._executor.allocate()[target]
                self._embedded[target] = Target(Setup("", dtype_name(dtype), buckets, tuple(checksums)), [buffer])
            else:
                size = self._executor.buffer_bytes(target)
                self._channels[target] = Channel(names[target], dtype_name(dtype), buckets, checksums, size, device)
        self._sums: tuple[dict[str, int], RegionSums] | None = None

    @property
    def sockets(self) -> dict[int, str]:
        """By target rank that this process hosts, where its loader asks for weights."""
        return {target: made.path for target, made in self._channels.items()}

    def sync(
        self,
        number: int,
        source: Mapping[str, torch.Tensor],
        embedded: Mapping[str, torch.Tensor] | None,
        verify: str,
        deadline: float,
    ) -> SyncReport:
        """Move the weights. All ranks call it, and every engine rank's loader.

        Args:
            number: of the sync, counted up.
            source: the actor's parameters.
            embedded: the parameters of the engine that lives in this process.
            deadline: seconds.

        Raises:
            RuntimeError: an engine rank could not take the weights, went away or was late; after the exchanges with the
                other ranks, who need not know.
        """
        until = time.monotonic() + deadline
        if self._communicators is not None:
            self._communicators.connect(until)
        deliveries: dict[int, ChannelDelivery | LocalDelivery] = {}
        try:
            for target, made in self._channels.items():
                deliveries[target] = ChannelDelivery(made, number, verify, until)
            for target, known in self._embedded.items():
                assert embedded is not None, "the embedded engine's parameters are missing"
                deliveries[target] = LocalDelivery(known, embedded)
            moved = deliver(self._executor, deliveries, source, verify)
            sums = self._source_sums(source) if verify != channel.OFF else []
            loaded = {
                target: known.report(known.sums() if verify != channel.OFF else [])
                for target, known in self._embedded.items()
            }
            seconds = time.monotonic() - moved
            for delivery in deliveries.values():
                delivery.finish()
        finally:
            for delivery in deliveries.values():
                delivery.close()
        failures = {target: d.failure for target, d in deliveries.items() if d.failure is not None}
        if self._communicators is not None:
            self.lost |= {self._plan.target.replica_of[target] for target in failures}
        for failure in failures.values():
            raise failure
        lost = dict(self._communicators.lost) if self._communicators is not None else {}
        return SyncReport(sums, loaded, seconds, lost)

    def close(self) -> None:
        """Give the sockets back; this sender syncs no more."""
        for made in self._channels.values():
            made.close()

    def _buckets(self, target: int) -> tuple[tuple[BucketRegion, ...], ...]:
        layouts = [self._executor.layout(bucket, target) for bucket in range(self._executor.num_buckets)]
        return tuple(layout.regions if layout is not None else () for layout in layouts)

    def _source_sums(self, source: Mapping[str, torch.Tensor]) -> list[int]:
        """The checksums of this rank's pieces of the source layout; prepared anew when a parameter has moved."""
        if self._rank >= self._plan.source.num_ranks:
            return []
        addresses = {name: parameter.data_ptr() for name, parameter in source.items()}
        if self._sums is None or self._sums[0] != addresses:
            pieces = self._plan.source.shard(self._rank).pieces
            self._sums = (addresses, RegionSums(piece_regions(pieces, source, self._plan.source), self._dtype))
        return self._sums[1].run()


class SyncMember:
    """A process's place in the syncs: its sender, made anew for new terms, and its communicators, which outlive it."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        """
        Args:
            rank: as `SyncTerms` counts processes.
        """
        self._config, self._rank, self._device = config, rank, device
        self._store: dist.Store | None = None
        self._communicators: Communicators | None = None
        self._sender: WeightSender | None = None

    @property
    def sender(self) -> WeightSender:
        assert self._sender is not None, "prepare comes first"
        return self._sender

    def open_store(self, address: str) -> int:
        """Serve the store at which all processes' communicators meet, once; returns its port."""
        if self._store is None:
            timeout = timedelta(seconds=self._config.run.deadline)
            self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port: int = self._store.port  # type: ignore[attr-defined]
        return port

    def prepare(self, source: Layout, terms: SyncTerms, *, is_embedded: bool = False, group: Any = None) -> Facts:
        """Plan, and take new buffers.

        Args:
            group: of torch.distributed, where `terms` has no store.
        """
        made = terms.plan(source, self._config)
        if terms.store is not None:
            group = self._join(*terms.store)
            group.assign(memberships(made, terms.hosts, terms.generations), made.target.replica_of)
        if self._sender is not None:
            self._sender.close()
        names = None if is_embedded else terms.names
        dtype = wire_dtype(self._config)
        self._sender = WeightSender(made, dtype, self._rank, terms.hosts, self._device, names, group)
        summary = made.summary() if self._rank == 0 else None
        return Facts(len(made.buckets), summary, self._sender.sockets)

    def lost(self) -> set[int]:
        """Replicas whose communicator is not to be used again."""
        broken = set(self._communicators.lost) if self._communicators is not None else set()
        return broken | (self._sender.lost if self._sender is not None else set())

    def _join(self, address: str, port: int) -> Communicators:
        if self._communicators is None:
            if self._store is None:
                timeout = timedelta(seconds=self._config.run.deadline)
                self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            self._communicators = Communicators(self._store, self._rank, self._device)
        return self._communicators


def checksum_regions(layout: Layout, rank: int) -> list[ChecksumRegion]:
    """What to sum of an engine rank's own parameters: one region for each piece of its shard, in order."""
    regions = []
    for piece in layout.shard(rank).pieces:
        local, rect = piece.local, piece.rect
        columns = as_matrix(layout.tensors[piece.tensor])[1]
        regions.append(
            ChecksumRegion(
                piece.parameter, (local.row0, local.row1), (local.col0, local.col1), rect.row0, rect.col0, columns
            )
        )
    return regions


def save_hf(
    plan: ReshardPlan,
    dtype: torch.dtype,
    rank: int,
    num_processes: int,
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
    source_folder: str,
    folder: str,
) -> None:
    """Write the weights as a Hugging Face folder, ranks in parallel, with config and tokenizer beside them (rank 0)."""
    group = dist.group.WORLD if num_processes > 1 else None
    hf_files.FileSaver(plan, dtype, rank, num_processes, device, group).save(folder, parameters)
    if rank == 0:
        hf_files.copy_companions(
            source_folder,
            folder,
            change=lambda known: {
                **{k: v for k, v in known.items() if k != "torch_dtype"},
                "dtype": dtype_name(dtype),
            },
        )
    if num_processes > 1:
        dist.barrier()  # an index before its files would make half a checkpoint look whole
    if rank == 0:
        hf_files.write_index(folder, plan.target, plan.itemsize)


def load_role(
    role: str, folder: str, hf_config: Any, layout: Layout, rank: int, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Read this rank's slices of a role from a Hugging Face folder. A critic may be made of a language model: its body
    comes from there, and the value head stays as it is."""
    source = declare_role(role, hf_config)
    if role == "critic" and VALUE_HEAD not in hf_files.tensor_files(folder):
        source = declare(hf_config)
        layout = layout.of_tensors(source.tensors())
    hf_files.load(folder, layout, rank, parameters, hf_layout(source))


def wire_dtype(config: Config) -> torch.dtype:
    """The type that the engine's weights have, and so the wire's."""
    return DTYPES[config.model.precision]


def compare_parameters(
    planned: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raises:
    ValueError: a parameter that the engine has and the plan lacks, or the other way round, or of another shape.
    """
    for name in sorted(planned.keys() | actual.keys()):
        if planned.get(name) != actual.get(name):
            raise ValueError(
                f"{where}: parameter {name} is {actual.get(name, 'missing')} in the engine, "
                f"{planned.get(name, 'missing')} in the plan"
            )
