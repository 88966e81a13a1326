"""Position-weighted checksums of weights: what every sync compares between the source and the engine's own parameters.

The sum of an element's bits times a weight that depends on its position in the canonical tensor, modulo 2**64. It adds
up over rectangles, so each rank sums what it holds; swapped regions, a wrong tensor or a stale one change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from megarl.reshard.layout import Layout, Piece, Rect, as_matrix

MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2**64 / golden ratio, odd
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements summed at once: bounds the int64 temporaries to some 100 MB."""
_MODULUS = 1 << 64


def region_checksum(values: torch.Tensor, row0: int, col0: int, num_cols: int) -> int:
    """The checksum of a rectangle.

    Args:
        values: [rows, columns] of any type of 1, 2, 4 or 8 bytes.
        row0, col0: where its upper left corner lies in the canonical tensor, which has `num_cols` columns.
    """
    rows, cols = values.shape
    step = max(_CHUNK // max(cols, 1), 1)
    total = 0
    for start in range(0, rows, step):
        part = values[start : start + step]
        elements = bits(part).to(torch.int64)
        row = torch.arange(row0 + start, row0 + start + part.shape[0], device=values.device, dtype=torch.int64)
        col = torch.arange(col0, col0 + cols, device=values.device, dtype=torch.int64)
        weight = (row[:, None] * num_cols + col[None, :] + 1) * MULTIPLIER
        weight ^= weight >> 29
        total += int(((elements + 1) * (weight | 1)).sum())
    return total % _MODULUS


def bits(values: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as whole numbers of the same size: NaNs of equal bits are equal."""
    return values.contiguous().view(_BITS[values.element_size()])


def piece_regions(
    pieces: Sequence[Piece], parameters: Mapping[str, torch.Tensor], layout: Layout
) -> list[tuple[torch.Tensor, int, int, int]]:
    """What to sum of a rank's parameters: for each piece its view [rows, columns], and its row, column and number of
    columns in the canonical tensor. `regions.RegionSums` takes them."""
    regions = []
    for piece in pieces:
        local = piece.local
        values = matrix(parameters[piece.parameter].data)[local.row0 : local.row1, local.col0 : local.col1]
        columns = as_matrix(layout.tensors[piece.tensor])[1]
        regions.append((values, piece.rect.row0, piece.rect.col0, columns))
    return regions


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a parameter as rows x columns."""
    return tensor.view(as_matrix(tuple(tensor.shape)))


class TensorChecksums:
    """Adds up the checksums of pieces to those of the canonical tensors. Made once for the ranks that hold a model."""

    def __init__(self, layout: Layout, ranks: Iterable[int]) -> None:
        """
        Raises:
            ValueError: the ranks do not hold all of a tensor.
        """
        self.layout, self.ranks = layout, tuple(ranks)
        self._counts = [len(layout.shard(rank).pieces) for rank in self.ranks]
        tensors = {name: index for index, name in enumerate(layout.tensors)}
        rectangles: dict[tuple[str, Rect], int] = {}
        self._first: list[int] = []  # of each rectangle: which of all pieces holds it first
        of_piece: list[int] = []
        for rank in self.ranks:
            for piece in layout.shard(rank).pieces:
                index = rectangles.setdefault((piece.tensor, piece.rect), len(rectangles))
                if index == len(self._first):
                    self._first.append(len(of_piece))
                of_piece.append(index)
        self._rectangles = list(rectangles)
        self._of_piece = np.array(of_piece, dtype=np.int64)
        self._tensor_of = np.array([tensors[name] for name, _ in self._rectangles], dtype=np.int64)
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes = dict.fromkeys(self.layout.tensors, 0)
        for name, rect in self._rectangles:
            sizes[name] += rect.size
        for name, shape in self.layout.tensors.items():
            if sizes[name] != math.prod(shape):
                raise ValueError(
                    f"{self.layout.name}: the checksums of {name} speak for {sizes[name]} of its {math.prod(shape)} "
                    "elements"
                )

    def of(self, sums: Mapping[int, Sequence[int]]) -> dict[str, int]:
        """The checksum of every canonical tensor.

        Args:
            sums: per rank, one checksum for each of its pieces, in the shard's order.

        Raises:
            ValueError: two ranks hold different values of the same rectangle.
        """
        for rank, count in zip(self.ranks, self._counts, strict=True):
            assert len(sums[rank]) == count, f"rank {rank} has {count} pieces, but gave {len(sums[rank])} checksums"
        values = np.array([value for rank in self.ranks for value in sums[rank]], dtype=np.uint64)
        first = values[self._first]
        differs = np.flatnonzero(values != first[self._of_piece])
        if len(differs):
            name, rect = self._rectangles[self._of_piece[differs[0]]]
            a, b = (self._rank_of(piece) for piece in (self._first[self._of_piece[differs[0]]], differs[0]))
            raise ValueError(f"{self.layout.name}: {name} {rect} differs between ranks {a} and {b}")
        totals = np.zeros(len(self.layout.tensors), dtype=np.uint64)
        np.add.at(totals, self._tensor_of, first)  # wraps, as is wanted
        return dict(zip(self.layout.tensors, totals.tolist(), strict=True))

    def _rank_of(self, piece: int) -> int:
        return self.ranks[int(np.searchsorted(np.cumsum(self._counts), piece, side="right"))]


def compare(expected: Mapping[str, int], actual: Mapping[str, int], where: str) -> None:
    """Raises:
    ValueError: naming the tensors whose checksums differ.
    """
    wrong = [name for name in expected if expected[name] != actual.get(name)]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ValueError(
            f"weights of {where} differ from the trainer's in {len(wrong)} of {len(expected)} tensors: {shown}"
        )
