"""Plans: which rectangle of which rank's parameter goes to which rank's parameter. Pure, deterministic, made once.

Among the ranks that hold the same rectangle the planner picks the nearest to the target (same GPU, then same node) and,
among equals, the one that has sent the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from megarl.reshard.layout import Layout, Piece, Rect

ALIGNMENT = 16
"""Bytes: every source's part of a bucket starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: a GPU (or a process, where there is none) of a node."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy rectangle `rect` of canonical tensor `tensor` from a source rank's parameter to a target rank's."""

    tensor: str
    rect: Rect
    source_rank: int
    source_parameter: str
    source: Rect
    target_rank: int
    target_parameter: str
    target: Rect


@dataclass(frozen=True)
class Summary:
    """Bytes that one execution of a plan moves, by the link they take."""

    local: int
    intra_node: int
    inter_node: int
    peak_buffer: int
    """The largest bucket of any one target rank."""
    lower_bound: int
    """Bytes that the target ranks' parameters hold: none can arrive without being written once."""
    num_buckets: int

    def __str__(self) -> str:
        mb = {name: f"{value / 1e6:,.1f} MB" for name, value in self.__dict__.items() if name != "num_buckets"}
        return (
            f"{self.num_buckets} bucket{'s' if self.num_buckets != 1 else ''}; local {mb['local']}, "
            f"within nodes {mb['intra_node']}, between nodes {mb['inter_node']}; written {mb['lower_bound']}; "
            f"largest bucket {mb['peak_buffer']}"
        )


@dataclass(frozen=True)
class ReshardPlan:
    """Copies in buckets; buckets are executed in order, all ranks together. A tensor may be spread over several."""

    source: Layout
    target: Layout
    source_places: tuple[Place, ...]
    target_places: tuple[Place, ...]
    buckets: tuple[tuple[Copy, ...], ...]
    itemsize: int

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for bucket in self.buckets for copy in bucket)

    def summary(self) -> Summary:
        local = intra = inter = 0
        for copy in self.copies:
            size = copy.rect.size * self.itemsize
            source, target = self.source_places[copy.source_rank], self.target_places[copy.target_rank]
            if source == target:
                local += size
            elif source.node == target.node:
                intra += size
            else:
                inter += size
        written = (
            sum(p.rect.size for r in range(self.target.num_ranks) for p in self.target.shard(r).pieces) * self.itemsize
        )
        return Summary(
            local, intra, inter, max(map(self._largest, self.buckets), default=0), written, len(self.buckets)
        )

    def _largest(self, bucket: Sequence[Copy]) -> int:
        sizes: dict[int, int] = {}
        for copy in bucket:
            sizes[copy.target_rank] = sizes.get(copy.target_rank, 0) + copy.rect.size * self.itemsize
        return max(sizes.values(), default=0)


def plan(
    source: Layout,
    target: Layout,
    itemsize: int,
    source_places: Sequence[Place] | None = None,
    target_places: Sequence[Place] | None = None,
    bucket_bytes: int = 512 * 2**20,
) -> ReshardPlan:
    """Plan the copies that fill every piece of every target rank.

    Args:
        itemsize: bytes of one element on the wire (the target's type).
        source_places, target_places: one place a rank; by default each rank is a GPU of its own on one node.
        bucket_bytes: what a rank receives, and what it sends to other places, in one bucket at most. Rows are never
            cut, so a row that is larger makes a bucket of its own.

    Raises:
        ValueError: a target tensor that the source lacks or that has another shape there, or a part that no source
            rank holds.
    """
    source_places = tuple(source_places or (Place(0, r) for r in range(source.num_ranks)))
    target_places = tuple(target_places or (Place(0, r) for r in range(target.num_ranks)))
    assert len(source_places) == source.num_ranks, "one place a source rank is needed"
    assert len(target_places) == target.num_ranks, "one place a target rank is needed"
    _check_tensors(source, target)
    origins = _origins(source)
    holders: dict[tuple[int, ...], _Holders] = {}
    sent = [0] * source.num_ranks
    copies: list[Copy] = []
    for tensor in _in_turns(target.tensors, origins):
        parts_of = [_parts(tensor, shard.by_tensor.get(tensor, ()), origins.get(tensor, {})) for shard in target.shards]
        for rank, place in enumerate(target_places):
            for part in parts_of[target.shard_of[rank]]:
                shards = tuple(part.origins)
                if shards not in holders:
                    holders[shards] = _Holders.of(source, shards, source_places)
                holder = min(holders[shards].nearest(place), key=sent.__getitem__)
                sent[holder] += part.rect.size * itemsize
                parameter, local = part.origins[source.shard_of[holder]]
                copies.append(Copy(tensor, part.rect, holder, parameter, local, rank, part.parameter, part.local))
    buckets = _buckets(copies, itemsize, bucket_bytes, source_places, target_places)
    return ReshardPlan(source, target, source_places, target_places, buckets, itemsize)


def _check_tensors(source: Layout, target: Layout) -> None:
    for name, shape in target.tensors.items():
        if name not in source.tensors:
            raise ValueError(f"{target.name} needs {name}, which {source.name} does not have")
        if source.tensors[name] != shape:
            raise ValueError(
                f"{name} is {list(source.tensors[name])} in {source.name}, but {list(shape)} in {target.name}"
            )


Origins = dict[Rect, dict[int, Piece]]
"""The rectangles that a source cuts a tensor into, and per rectangle each shard that holds it and where. Norms under
tensor parallel and tied embeddings lie in several shards: each may be the nearest to some target."""


def _origins(source: Layout) -> dict[str, Origins]:
    found: dict[str, Origins] = {}
    for index, shard in enumerate(source.shards):
        for piece in shard.pieces:
            found.setdefault(piece.tensor, {}).setdefault(piece.rect, {}).setdefault(index, piece)
    return found


def _in_turns(tensors: Iterable[str], origins: Mapping[str, Origins]) -> list[str]:
    """The tensors, those of different source shards in turn: every bucket has work for all pipeline stages at once."""
    by_shard: dict[int, list[str]] = {}
    for tensor in tensors:
        shards = next(iter(origins.get(tensor, {}).values()), {})
        by_shard.setdefault(next(iter(shards), 0), []).append(tensor)
    return [tensor for turn in zip_longest(*by_shard.values()) for tensor in turn if tensor is not None]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a target piece gets of one source rectangle; the same for all ranks that hold the target's shard."""

    rect: Rect
    parameter: str
    local: Rect
    origins: Mapping[int, tuple[str, Rect]]
    """Per source shard that holds it: the parameter and where it lies there."""


def _parts(tensor: str, targets: Sequence[Piece], origins: Origins) -> list[_Part]:
    parts: list[_Part] = []
    for piece in targets:
        covered = 0
        for origin, holders in origins.items():
            rect = piece.rect.intersect(origin)
            if rect is not None:
                covered += rect.size
                places = {shard: (held.parameter, held.local_of(rect)) for shard, held in holders.items()}
                parts.append(_Part(rect, piece.parameter, piece.local_of(rect), places))
        if covered != piece.rect.size:
            raise ValueError(f"{tensor} {piece.rect}: the source holds {covered} of its {piece.rect.size} elements")
    return parts


@dataclass(frozen=True)
class _Holders:
    """The ranks, ascending, that hold one of some source shards, and those of them at each place and on each node."""

    ranks: Sequence[int]
    by_place: Mapping[Place, Sequence[int]]
    by_node: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, source: Layout, shards: Iterable[int], places: Sequence[Place]) -> _Holders:
        ranks = sorted(rank for shard in shards for rank in source.holders[shard])
        by_place: dict[Place, list[int]] = {}
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_place.setdefault(places[rank], []).append(rank)
            by_node.setdefault(places[rank].node, []).append(rank)
        return cls(ranks, by_place, by_node)

    def nearest(self, place: Place) -> Sequence[int]:
        return self.by_place.get(place) or self.by_node.get(place.node) or self.ranks


def _buckets(
    copies: Sequence[Copy],
    itemsize: int,
    bucket_bytes: int,
    source_places: Sequence[Place],
    target_places: Sequence[Place],
) -> tuple[tuple[Copy, ...], ...]:
    """Each copy goes into the first bucket that has room for it: no target rank receives, and no source rank packs for
    other places, more than bucket_bytes. A bucket that is nine tenths full for a rank takes no more of that rank's."""
    full = bucket_bytes * 9 // 10
    buckets: list[list[Copy]] = []
    received: list[list[int]] = []  # bucket, target rank
    packed: list[list[int]] = []  # bucket, source rank
    open_to_target, open_to_source = [0] * len(target_places), [0] * len(source_places)
    for copy in (part for whole in copies for part in _split(whole, itemsize, bucket_bytes)):
        source, target = copy.source_rank, copy.target_rank
        size = copy.rect.size * itemsize + ALIGNMENT
        outgoing = 0 if source_places[source] == target_places[target] else size
        index = max(open_to_target[target], open_to_source[source] if outgoing else 0)
        while index < len(buckets):
            if received[index][target] + size <= bucket_bytes and packed[index][source] + outgoing <= bucket_bytes:
                break
            index += 1
        else:
            buckets.append([])
            received.append([0] * len(target_places))
            packed.append([0] * len(source_places))
        buckets[index].append(copy)
        received[index][target] += size
        packed[index][source] += outgoing
        while open_to_target[target] < len(buckets) and received[open_to_target[target]][target] > full:
            open_to_target[target] += 1
        while open_to_source[source] < len(buckets) and packed[open_to_source[source]][source] > full:
            open_to_source[source] += 1
    return tuple(map(tuple, buckets))


def _split(copy: Copy, itemsize: int, bucket_bytes: int) -> list[Copy]:
    """A copy that is larger than a bucket, cut by rows."""
    rows_each = max((bucket_bytes - ALIGNMENT) // max(copy.rect.num_cols * itemsize, 1), 1)
    if copy.rect.num_rows <= rows_each:
        return [copy]

    def rows(rect: Rect, start: int, stop: int) -> Rect:
        return Rect(rect.row0 + start, rect.row0 + stop, rect.col0, rect.col1)

    parts = []
    for start in range(0, copy.rect.num_rows, rows_each):
        stop = min(start + rows_each, copy.rect.num_rows)
        parts.append(
            Copy(
                copy.tensor,
                rows(copy.rect, start, stop),
                copy.source_rank,
                copy.source_parameter,
                rows(copy.source, start, stop),
                copy.target_rank,
                copy.target_parameter,
                rows(copy.target, start, stop),
            )
        )
    return parts
