"""Layouts: where each element of each weight lives.

A canonical tensor is named and shaped as in the Hugging Face checkpoint. A layout maps rectangles of canonical tensors
to rectangles of local parameters. A tensor of one dimension counts as rows x 1; one of more than two as the product of
all but the last as rows x the last (matrices below each other).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Rows row0..row1 and columns col0..col1 (ends not included)."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def num_rows(self) -> int:
        return self.row1 - self.row0

    @property
    def num_cols(self) -> int:
        return self.col1 - self.col0

    @property
    def size(self) -> int:
        return self.num_rows * self.num_cols

    def intersect(self, other: Rect) -> Rect | None:
        row0, row1 = max(self.row0, other.row0), min(self.row1, other.row1)
        col0, col1 = max(self.col0, other.col0), min(self.col1, other.col1)
        return Rect(row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None

    def minus(self, other: Rect) -> list[Rect]:
        """What the other does not cover: above, below, left and right of it, without what is empty."""
        shared = self.intersect(other)
        if shared is None:
            return [self] if self.size else []
        parts = (
            Rect(self.row0, shared.row0, self.col0, self.col1),
            Rect(shared.row1, self.row1, self.col0, self.col1),
            Rect(shared.row0, shared.row1, self.col0, shared.col0),
            Rect(shared.row0, shared.row1, shared.col1, self.col1),
        )
        return [part for part in parts if part.size]

    def moved(self, rows: int, cols: int) -> Rect:
        return Rect(self.row0 + rows, self.row1 + rows, self.col0 + cols, self.col1 + cols)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """(rows, columns) that a shape counts as: (7,) -> (7, 1); (4, 3, 2) -> (12, 2)."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """The rectangle `rect` of a canonical tensor lies in `parameter`, its upper left corner at (row, col) there."""

    tensor: str
    rect: Rect
    parameter: str
    row: int
    col: int

    @property
    def local(self) -> Rect:
        return self.rect.moved(self.row - self.rect.row0, self.col - self.rect.col0)

    def local_of(self, rect: Rect) -> Rect:
        """Where a part of this piece's rectangle lies in the parameter."""
        return rect.moved(self.row - self.rect.row0, self.col - self.rect.col0)


@dataclass(frozen=True)
class Shard:
    """What one rank holds: the shapes of its parameters, and the pieces of canonical tensors in them."""

    parameters: Mapping[str, Shape]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """Shards, and which rank holds which: ranks that are replicas of each other name the same shard.

    Layout("megatron tp2 pp1 dp2", tensors, shards=(s0, s1), shard_of=(0, 1, 0, 1)): ranks 0 and 2 are replicas.
    """

    name: str
    tensors: Mapping[str, Shape]
    """Canonical shapes, in the order of the model."""
    shards: tuple[Shard, ...]
    shard_of: tuple[int, ...]
    replica_of: tuple[int, ...] = field(default=())
    """For a layout that holds the whole model several times: which copy each rank belongs to. Empty: all are one."""

    def __post_init__(self) -> None:
        assert all(0 <= s < len(self.shards) for s in self.shard_of), "shard_of names a shard that does not exist"
        assert not self.replica_of or len(self.replica_of) == len(self.shard_of), "replica_of needs one entry a rank"

    @property
    def num_ranks(self) -> int:
        return len(self.shard_of)

    def shard(self, rank: int) -> Shard:
        return self.shards[self.shard_of[rank]]

    def of_tensors(self, names: Container[str]) -> Layout:
        """The same layout without the pieces of other tensors; parameters stay."""
        shards = tuple(replace(s, pieces=tuple(p for p in s.pieces if p.tensor in names)) for s in self.shards)
        return replace(self, tensors={n: shape for n, shape in self.tensors.items() if n in names}, shards=shards)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each shard."""
        ranks: list[list[int]] = [[] for _ in self.shards]
        for rank, shard in enumerate(self.shard_of):
            ranks[shard].append(rank)
        return tuple(tuple(r) for r in ranks)


def check_cover(layout: Layout, ranks: Sequence[int] | None = None) -> None:
    """Each element of each canonical tensor lies in one of the ranks' pieces; those of a tensor are equal or disjoint.

    Raises:
        ValueError: naming the tensor and how many of its elements are covered.
    """
    covered: dict[str, set[Rect]] = {name: set() for name in layout.tensors}
    for shard_index in {layout.shard_of[r] for r in (range(layout.num_ranks) if ranks is None else ranks)}:
        for piece in layout.shards[shard_index].pieces:
            covered[piece.tensor].add(piece.rect)
    for name, shape in layout.tensors.items():
        size = sum(rect.size for rect in covered[name])
        if size != math.prod(shape):
            raise ValueError(f"layout {layout.name}: {name} has {math.prod(shape)} elements, its pieces hold {size}")
