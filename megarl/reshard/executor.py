"""Executes a plan bucket by bucket: packs regions, exchanges them in a batch of point-to-point messages, hands them on.

A bucket of a target rank is one flat buffer in which each source rank's regions lie together, so that what arrives
needs no copy: it is received where it stays. The regions are then written into parameters (`transports.copy_regions`),
in this process or in the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.reshard.checksum import matrix
from megarl.reshard.plan import ALIGNMENT, Copy, ReshardPlan
from megarl.reshard.transports import BucketRegion, dtype_name


@dataclass(frozen=True)
class Span:
    """The bytes of a target rank's bucket that come from one source rank, and the copies that fill them."""

    source_rank: int
    start: int
    stop: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class BucketLayout:
    """How one target rank's part of a bucket lies in its flat buffer."""

    target_rank: int
    spans: tuple[Span, ...]
    regions: tuple[BucketRegion, ...]
    num_bytes: int


def bucket_layouts(bucket: Sequence[Copy], dtype: torch.dtype) -> dict[int, BucketLayout]:
    """Per target rank, how its bucket lies in memory. Pure: sender and receiver derive the same."""
    by_target: dict[int, dict[int, list[Copy]]] = {}
    for copy in bucket:
        by_target.setdefault(copy.target_rank, {}).setdefault(copy.source_rank, []).append(copy)
    layouts = {}
    for target, by_source in sorted(by_target.items()):
        spans, regions, offset = [], [], 0
        for source, copies in sorted(by_source.items()):
            start = offset
            for copy in copies:
                rows, columns = (copy.target.row0, copy.target.row1), (copy.target.col0, copy.target.col1)
                regions.append(BucketRegion(copy.target_parameter, dtype_name(dtype), rows, columns, offset))
                offset += copy.rect.size * dtype.itemsize
            spans.append(Span(source, start, offset, tuple(copies)))
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
        layouts[target] = BucketLayout(target, tuple(spans), tuple(regions), offset)
    return layouts


class Executor:
    """One process's part in executing a plan, again and again."""

    def __init__(
        self,
        plan: ReshardPlan,
        dtype: torch.dtype,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        shared_memory: bool = False,
    ) -> None:
        """
        Args:
            dtype: of the elements on the wire.
            rank: this process's rank among the source ranks and in `group`.
            hosts: per target rank, the process that receives for it.
            group: all processes that take part; None if this is the only one.
            shared_memory: buckets go on to another process on a CPU, so they lie where it can map them.
        """
        assert plan.itemsize == dtype.itemsize, (
            f"the plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}"
        )
        self.plan, self.dtype, self.rank, self.hosts = plan, dtype, rank, tuple(hosts)
        self.device, self.group = device, group
        self._layouts = [bucket_layouts(self._own(bucket), dtype) for bucket in plan.buckets]
        self._shared_memory = shared_memory
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._layouts)

    def layout(self, bucket: int, target_rank: int) -> BucketLayout | None:
        """How a bucket of a target rank that this process hosts lies in memory; None where it gets nothing."""
        assert self.hosts[target_rank] == self.rank, f"target rank {target_rank} is hosted by {self.hosts[target_rank]}"
        return self._layouts[bucket].get(target_rank)

    def _own(self, bucket: Sequence[Copy]) -> list[Copy]:
        """The copies that this process sends or receives: on a large grid few of all."""
        return [c for c in bucket if c.source_rank == self.rank or self.hosts[c.target_rank] == self.rank]

    def targets(self) -> list[int]:
        """The target ranks that this process receives for."""
        return [t for t, host in enumerate(self.hosts) if host == self.rank]

    def exchange(self, bucket: int, parameters: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Execute one bucket. All processes of the group call it with the same bucket.

        Args:
            parameters: this process's source parameters, by the names of the source layout.

        Returns:
            per target rank that this process hosts, the flat uint8 buffer; it is overwritten by the next exchange.
        """
        operations: list[dist.P2POp] = []
        received: dict[int, torch.Tensor] = {}
        for target, layout in self._layouts[bucket].items():
            host = self.hosts[target]
            flat = self._buffer(target, layout.num_bytes) if host == self.rank else None
            if flat is not None:
                received[target] = flat
            for span in layout.spans:
                if span.source_rank == self.rank:
                    if flat is not None:
                        self._pack(span, parameters, flat[span.start : span.stop])
                    else:
                        outgoing = torch.empty(span.stop - span.start, dtype=torch.uint8, device=self.device)
                        self._pack(span, parameters, outgoing)
                        operations.append(dist.P2POp(dist.isend, outgoing, self._global(host), self.group, tag=target))
                elif flat is not None:
                    operations.append(
                        dist.P2POp(
                            dist.irecv,
                            flat[span.start : span.stop],
                            self._global(span.source_rank),
                            self.group,
                            tag=target,
                        )
                    )
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _pack(self, span: Span, parameters: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        values, offset = flat.view(self.dtype), 0
        targets, sources = [], []
        for copy in span.copies:
            rect = copy.source
            sources.append(matrix(parameters[copy.source_parameter].data)[rect.row0 : rect.row1, rect.col0 : rect.col1])
            targets.append(values[offset : offset + rect.size].view(rect.num_rows, rect.num_cols))
            offset += rect.size
        torch._foreach_copy_(targets, sources)

    def _buffer(self, target: int, num_bytes: int) -> torch.Tensor:
        """A target rank's buffer, made once for its largest bucket: an engine may hold a handle to it."""
        if target not in self._buffers:
            largest = max(layouts[target].num_bytes for layouts in self._layouts if target in layouts)
            buffer = torch.zeros(largest, dtype=torch.uint8, device=self.device)
            if self._shared_memory and self.device.type == "cpu":
                buffer.share_memory_()
            self._buffers[target] = buffer
        return self._buffers[target][:num_bytes]
