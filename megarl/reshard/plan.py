"""Plans: which rectangle of which rank's parameter goes to which rank's parameter. Pure, deterministic, made once.

Among the ranks that hold the same rectangle the planner picks the nearest to the target (same GPU, then same node) and,
among equals, the one that has sent the fewest bytes so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from megarl.reshard.layout import Layout, Piece, Rect, Shard

ALIGNMENT = 16
"""Bytes: every source's part of a bucket starts at a multiple of this."""


class Place(NamedTuple):
    """Where a rank is: a GPU (or a process, where there is none) of a node."""

    node: int
    gpu: int


class Copy(NamedTuple):
    """Copy rectangle `rect` of canonical tensor `tensor` from a source rank's parameter to a target rank's. A tuple,
    because a plan for a thousand ranks has a million of them."""

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
    """Bytes that one execution of a plan moves. local, intra_node, inter_node: by the link they take."""

    local: int
    intra_node: int
    inter_node: int
    crossing_lower_bound: int
    """Bytes that must cross a link at least: what the targets at a place need and no source there holds, each element
    once a place. With one target rank a place a plan crosses no more."""
    written: int
    """Bytes that the target ranks' parameters hold: none can arrive without being written once."""
    peak_buffer: int
    """The most that the ranks at any one place receive and pack for other places in one bucket. An execution with
    double buffering has two of those in use at a time."""
    num_buckets: int

    def __str__(self) -> str:
        mb = {name: f"{value / 1e6:,.1f} MB" for name, value in self.__dict__.items() if name != "num_buckets"}
        return (
            f"{self.num_buckets} bucket{'s' if self.num_buckets != 1 else ''}; local {mb['local']}, "
            f"within nodes {mb['intra_node']}, between nodes {mb['inter_node']} (at least "
            f"{mb['crossing_lower_bound']} must leave a GPU); written {mb['written']}; "
            f"largest bucket {mb['peak_buffer']} a GPU"
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
        local = intra = inter = peak = 0
        for bucket in self.buckets:
            held: Counter[Place] = Counter()
            for copy in bucket:
                size = copy.rect.size * self.itemsize
                source, target = self.source_places[copy.source_rank], self.target_places[copy.target_rank]
                held[target] += size
                if source == target:
                    local += size
                    continue
                held[source] += size
                if source.node == target.node:
                    intra += size
                else:
                    inter += size
            peak = max(peak, *held.values())
        sizes = [sum(piece.rect.size for piece in shard.pieces) for shard in self.target.shards]
        written = sum(sizes[shard] for shard in self.target.shard_of) * self.itemsize
        return Summary(local, intra, inter, self._crossing_lower_bound(), written, peak, len(self.buckets))

    def _crossing_lower_bound(self) -> int:
        wanted: dict[Place, set[int]] = {}
        held: dict[Place, set[int]] = {}
        for found, layout, places in (
            (wanted, self.target, self.target_places),
            (held, self.source, self.source_places),
        ):
            for shard, place in zip(layout.shard_of, places, strict=True):
                found.setdefault(place, set()).add(shard)
        alike = Counter((frozenset(shards), frozenset(held.get(place, ()))) for place, shards in wanted.items())
        return self.itemsize * sum(
            count * _num_missing([self.target.shards[t] for t in targets], [self.source.shards[s] for s in sources])
            for (targets, sources), count in alike.items()
        )


def _num_missing(wanted: Iterable[Shard], held: Iterable[Shard]) -> int:
    """Elements that the wanted shards hold and the held ones do not, each counted once."""
    covered: dict[str, list[Rect]] = {}
    for shard in held:
        for piece in shard.pieces:
            covered.setdefault(piece.tensor, []).append(piece.rect)
    missing = 0
    for shard in wanted:
        for piece in shard.pieces:
            already = covered.setdefault(piece.tensor, [])
            parts = [piece.rect]
            for rect in already:
                parts = [rest for part in parts for rest in part.minus(rect)]
            missing += sum(part.size for part in parts)
            already.append(piece.rect)
    return missing


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
        bucket_bytes: what the ranks at one place receive and what they pack for other places, together, in one bucket
            at most. Rows are never cut, so a row that is larger makes a bucket of its own.

    Raises:
        ValueError: a target tensor that the source lacks or that has another shape there, or a part that no source
            rank holds.
    """
    source_places = tuple(source_places or (Place(0, r) for r in range(source.num_ranks)))
    target_places = tuple(target_places or (Place(0, r) for r in range(target.num_ranks)))
    assert len(source_places) == source.num_ranks, "one place a source rank is needed"
    assert len(target_places) == target.num_ranks, "one place a target rank is needed"
    _check_tensors(source, target)
    origins, wanted = _origins(source), _wanted(target)
    number_of = {place: number for number, place in enumerate(dict.fromkeys(source_places + target_places))}
    source_at, target_at = [number_of[p] for p in source_places], [number_of[p] for p in target_places]
    nearest: dict[tuple[int, ...], Sequence[Sequence[int]]] = {}
    sent = [0] * source.num_ranks
    buckets = _Buckets(bucket_bytes, len(number_of))
    for tensor in _in_turns(target.tensors, origins):
        parts_of = {
            shard: _parts(tensor, pieces, origins.get(tensor, {}), itemsize, bucket_bytes)
            for shard, pieces in wanted.get(tensor, {}).items()
        }
        for rank in sorted(rank for shard in parts_of for rank in target.holders[shard]):
            for part in parts_of[target.shard_of[rank]]:
                holders = tuple(part.origins)
                if holders not in nearest:
                    nearest[holders] = _nearest(source, holders, source_places, target_places)
                holder = min(nearest[holders][rank], key=sent.__getitem__)
                sent[holder] += part.num_bytes
                parameter, local = part.origins[source.shard_of[holder]]
                copy = Copy(tensor, part.rect, holder, parameter, local, rank, part.parameter, part.local)
                buckets.add(copy, part.num_bytes, source_at[holder], target_at[rank])
    return ReshardPlan(source, target, source_places, target_places, buckets.closed(), itemsize)


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


def _wanted(target: Layout) -> dict[str, dict[int, list[Piece]]]:
    """The pieces of each tensor by the shard that they fill."""
    found: dict[str, dict[int, list[Piece]]] = {}
    for index, shard in enumerate(target.shards):
        for piece in shard.pieces:
            found.setdefault(piece.tensor, {}).setdefault(index, []).append(piece)
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
    num_bytes: int


def _parts(tensor: str, targets: Sequence[Piece], origins: Origins, itemsize: int, bucket_bytes: int) -> list[_Part]:
    """In pieces that fit into a bucket."""
    parts: list[_Part] = []
    for piece in targets:
        covered = 0
        for origin, holders in origins.items():
            shared = piece.rect.intersect(origin)
            if shared is None:
                continue
            covered += shared.size
            for rect in _cut(shared, itemsize, bucket_bytes):
                places = {shard: (held.parameter, held.local_of(rect)) for shard, held in holders.items()}
                parts.append(_Part(rect, piece.parameter, piece.local_of(rect), places, rect.size * itemsize))
        if covered != piece.rect.size:
            raise ValueError(f"{tensor} {piece.rect}: the source holds {covered} of its {piece.rect.size} elements")
    return parts


def _cut(rect: Rect, itemsize: int, bucket_bytes: int) -> Iterable[Rect]:
    """A rectangle by rows, each part as large as a bucket at most, or one row."""
    rows_each = max((bucket_bytes - ALIGNMENT) // max(rect.num_cols * itemsize, 1), 1)
    for row in range(rect.row0, rect.row1, rows_each):
        yield Rect(row, min(row + rows_each, rect.row1), rect.col0, rect.col1)


def _nearest(
    source: Layout, shards: Iterable[int], source_places: Sequence[Place], target_places: Sequence[Place]
) -> list[Sequence[int]]:
    """Per target rank: of the ranks, ascending, that hold one of some source shards, those at its place; if there are
    none, those on its node; if there are none, all."""
    ranks = sorted(rank for shard in shards for rank in source.holders[shard])
    by_place: dict[Place, list[int]] = {}
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_place.setdefault(source_places[rank], []).append(rank)
        by_node.setdefault(source_places[rank].node, []).append(rank)
    return [by_place.get(place) or by_node.get(place.node) or ranks for place in target_places]


class _Buckets:
    """Each copy goes into the first bucket that has room for it: at no place do the ranks receive, and pack for other
    places, more than bucket_bytes together. A bucket that is nine tenths full for a place takes no more of that
    place's. Places are numbers here."""

    def __init__(self, bucket_bytes: int, num_places: int) -> None:
        self._room, self._full, self._num_places = bucket_bytes, bucket_bytes * 9 // 10, num_places
        self._copies: list[list[Copy]] = []
        self._held: list[list[int]] = []  # bucket, place: bytes
        self._first_open = [0] * num_places

    def add(self, copy: Copy, num_bytes: int, source: int, target: int) -> None:
        size = num_bytes + ALIGNMENT
        most = self._room - size
        first = max(self._first_open[source], self._first_open[target])
        for index in range(first, len(self._held)):
            held = self._held[index]
            if held[target] <= most and held[source] <= most:
                break
        else:
            index, held = len(self._held), [0] * self._num_places
            self._held.append(held)
            self._copies.append([])
        self._copies[index].append(copy)
        for place in (target,) if source == target else (target, source):
            held[place] += size
            if held[place] > self._full and index == self._first_open[place]:
                self._first_open[place] = self._next_open(place)

    def _next_open(self, place: int) -> int:
        index = self._first_open[place]
        while index < len(self._held) and self._held[index][place] > self._full:
            index += 1
        return index

    def closed(self) -> tuple[tuple[Copy, ...], ...]:
        return tuple(map(tuple, self._copies))
