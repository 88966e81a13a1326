"""A trainer process's part in moving weights: loading, the sync to the rollout engine, saving a Hugging Face folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.reshard import channel, hf_files
from megarl.reshard.channel import Channel, ChannelDelivery, LoadReport, LocalDelivery, Setup, Target, deliver
from megarl.reshard.checksum import piece_regions
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, as_matrix
from megarl.reshard.plan import ReshardPlan
from megarl.reshard.regions import RegionSums
from megarl.reshard.transports import BucketRegion, ChecksumRegion, dtype_name

MAX_FILE_BYTES = 4 * 2**30
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class SyncReport:
    """What a trainer rank says of a sync."""

    sums: list[int]
    """Checksums of its pieces of the source layout; empty with verify=off."""
    loaded: dict[int, LoadReport]
    """By target rank, what an embedded engine of this process holds."""
    verify_seconds: float
    """From the last bucket's exchange to the last sum."""


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
            group: all processes that take part, see `executor.exchange_messages`.
        """
        self._executor = Executor(plan, dtype, rank, hosts, device, group)
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
        for delivery in deliveries.values():
            if delivery.failure is not None:
                raise delivery.failure
        return SyncReport(sums, loaded, seconds)

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
    config: Mapping[str, Any],
) -> None:
    """Write the weights as a Hugging Face folder, ranks in parallel, with config and tokenizer beside them (rank 0)."""
    group = dist.group.WORLD if num_processes > 1 else None
    hf_files.FileSaver(plan, dtype, rank, num_processes, device, group).save(folder, parameters)
    if rank == 0:
        hf_files.copy_companions(
            source_folder,
            folder,
            change=lambda known: {**{k: v for k, v in known.items() if k != "torch_dtype"}, **config},
        )
    if num_processes > 1:
        dist.barrier()  # an index before its files would make half a checkpoint look whole
    if rank == 0:
        hf_files.write_index(folder, plan.target, plan.itemsize)


def load_hf(folder: str, target: Layout, rank: int, parameters: Mapping[str, torch.Tensor], source: Layout) -> None:
    """Read this rank's slices from a Hugging Face folder."""
    hf_files.load(folder, target, rank, parameters, source)


def wire_dtype(config: Config) -> torch.dtype:
    """The type that the engine's weights have, and so the wire's."""
    return TORCH_DTYPES[config.model.precision]


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
