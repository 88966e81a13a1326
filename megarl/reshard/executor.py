"""Executes a plan bucket by bucket: packs regions, exchanges them in a batch of point-to-point messages, hands them on.

A bucket of a target rank is one flat buffer in which each source rank's regions lie together, so that what arrives
needs no copy: it is received where it stays. The regions are then written into parameters (`regions.RegionCopies`), in
this process or in the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from megarl.reshard.checksum import matrix
from megarl.reshard.plan import ALIGNMENT, Copy, ReshardPlan
from megarl.reshard.regions import RegionCopies
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
            offset = _aligned(offset)
        layouts[target] = BucketLayout(target, tuple(spans), tuple(regions), offset)
    return layouts


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to or from another process of the group."""

    peer: int
    tag: int
    data: torch.Tensor


@runtime_checkable
class Exchange(Protocol):
    """What carries messages by itself, and may leave replicas behind: `communicator.Communicators`."""

    lost: dict[int, str]
    """By replica of the plan's target that gets nothing any more, the reason."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None: ...


def exchange_messages(group: Any, sends: Sequence[Message], receives: Sequence[Message]) -> None:
    """Start all messages as one batch and wait for them; on CUDA it is the current stream that waits.

    Args:
        group: a group of torch.distributed (None: the default one), or what has the send and recv of such a group: a
            backend's own object, as a process makes it that joins in nothing else.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        operations = [_operation(dist.isend, message, group) for message in sends]
        operations += [_operation(dist.irecv, message, group) for message in receives]
        works = dist.batch_isend_irecv(operations) if operations else []
    else:
        works = start_messages(group, sends, receives)
    for work in works:
        work.wait()


def _operation(kind: Any, message: Message, group: dist.ProcessGroup | None) -> dist.P2POp:
    peer = message.peer if group is None else dist.get_global_rank(group, message.peer)
    return dist.P2POp(kind, message.data, peer, group, tag=message.tag)


def start_messages(group: Any, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
    """Start messages over a backend's own object; what is to be waited for."""
    coalesces = bool(sends or receives) and getattr(group, "supports_coalescing", False)
    if coalesces:
        group._start_coalescing()
    works = [group.send([message.data], message.peer, message.tag) for message in sends]
    works += [group.recv([message.data], message.peer, message.tag) for message in receives]
    return [group._end_coalescing()] if coalesces else works


class Executor:
    """One process's part in executing a plan, again and again."""

    def __init__(
        self,
        plan: ReshardPlan,
        dtype: torch.dtype,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        group: Any = None,
    ) -> None:
        """
        Args:
            dtype: of the elements on the wire.
            rank: this process's rank in `group`: first the source ranks, then processes that only receive.
            hosts: per target rank, the process that receives for it.
            group: all processes that take part, see `exchange_messages`; or an `Exchange`.
        """
        assert plan.itemsize == dtype.itemsize, (
            f"the plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}"
        )
        self.plan, self.dtype, self.rank, self.hosts = plan, dtype, rank, tuple(hosts)
        self.device, self.group = device, group
        self._layouts = [bucket_layouts(self._own(bucket), dtype) for bucket in plan.buckets]
        self._outgoing: torch.Tensor | None = None
        self._packs: dict[int, tuple[tuple[int, ...], RegionCopies]] = {}

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

    def buffer_bytes(self, target_rank: int) -> int:
        """The size of a buffer that takes each bucket of a target rank which this process hosts."""
        return max((layouts[target_rank].num_bytes for layouts in self._layouts if target_rank in layouts), default=0)

    def allocate(self) -> dict[int, torch.Tensor]:
        """A buffer for each target rank that this process hosts; each takes any bucket."""
        sizes = {target: self.buffer_bytes(target) for target in self.targets()}
        return {t: torch.empty(size, dtype=torch.uint8, device=self.device) for t, size in sizes.items()}

    def exchange(
        self, bucket: int, parameters: Mapping[str, torch.Tensor], buffers: Mapping[int, torch.Tensor]
    ) -> None:
        """Execute one bucket. All processes of the group call it with the same bucket.

        On CUDA all is enqueued on the current stream: wait for it before another process reads the buffers.

        Args:
            parameters: this process's source parameters, by the names of the source layout; nothing where it is no
                source rank.
            buffers: per target rank that this process hosts, a flat uint8 buffer of `buffer_bytes` at least, which is
                overwritten. A bucket has the same buffers every time, or its copies are prepared anew.
        """
        layouts = self._layouts[bucket]
        packed: list[tuple[Span, torch.Tensor]] = []
        sends: list[Message] = []
        receives: list[Message] = []
        start = 0
        for target, layout in layouts.items():
            host = self.hosts[target]
            for span in layout.spans:
                if host == self.rank:
                    part = buffers[target][span.start : span.stop]
                    if span.source_rank != self.rank:
                        receives.append(Message(span.source_rank, target, part))
                        continue
                else:
                    part = self._outgoing_buffer()[start : start + span.stop - span.start]
                    start += _aligned(span.stop - span.start)
                    sends.append(Message(host, target, part))
                packed.append((span, part))
        self._pack(bucket, packed, parameters)
        if isinstance(self.group, Exchange):
            self.group.exchange(sends, receives)
        else:
            exchange_messages(self.group, sends, receives)

    def lost(self) -> dict[int, str]:
        """By target rank that this process hosts and that gets nothing any more, the reason."""
        if not isinstance(self.group, Exchange):
            return {}
        lost, replica_of = self.group.lost, self.plan.target.replica_of
        return {t: lost[replica_of[t]] for t in self.targets() if replica_of[t] in lost}

    def _pack(
        self, bucket: int, packed: Sequence[tuple[Span, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the parameters' regions; the copies are prepared anew when a parameter or a buffer has moved."""
        names = dict.fromkeys(copy.source_parameter for span, _ in packed for copy in span.copies)
        addresses = (*(parameters[n].data_ptr() for n in names), *(part.data_ptr() for _, part in packed))
        known = self._packs.get(bucket)
        if known is None or known[0] != addresses:
            self._packs[bucket] = known = (addresses, RegionCopies(*self._pack_views(packed, parameters)))
        known[1].run()

    def _pack_views(
        self, packed: Sequence[tuple[Span, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets, sources = [], []
        for span, part in packed:
            values, offset = part.view(self.dtype), 0
            for copy in span.copies:
                rect = copy.source
                whole = matrix(parameters[copy.source_parameter].data)
                sources.append(whole[rect.row0 : rect.row1, rect.col0 : rect.col1])
                targets.append(values[offset : offset + rect.size].view(rect.num_rows, rect.num_cols))
                offset += rect.size
        return targets, sources

    def _outgoing_buffer(self) -> torch.Tensor:
        """What this process packs for others, made once for its largest bucket. One is enough: an exchange has ended
        (on CUDA: in the order of the stream) before the next one packs."""
        if self._outgoing is None:
            size = max(map(self._outgoing_bytes, self._layouts))
            self._outgoing = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._outgoing

    def _outgoing_bytes(self, layouts: Mapping[int, BucketLayout]) -> int:
        spans = [s for t, layout in layouts.items() if self.hosts[t] != self.rank for s in layout.spans]
        return sum(_aligned(span.stop - span.start) for span in spans if span.source_rank == self.rank)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
