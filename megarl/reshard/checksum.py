"""Position-weighted checksums of weights: what every sync compares between the source and the engine's own parameters.

The sum of an element's bits times a weight that depends on its position in the canonical tensor, modulo 2**64. It adds
up over rectangles, so each rank sums what it holds; swapped regions, a wrong tensor or a stale one change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megarl.reshard.layout import Layout, Piece, Rect, as_matrix

_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2**64 / golden ratio, odd
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
        bits = part.contiguous().view(_BITS[values.element_size()]).to(torch.int64)
        row = torch.arange(row0 + start, row0 + start + part.shape[0], device=values.device, dtype=torch.int64)
        col = torch.arange(col0, col0 + cols, device=values.device, dtype=torch.int64)
        weight = (row[:, None] * num_cols + col[None, :] + 1) * _MULTIPLIER
        weight ^= weight >> 29
        total += int(((bits + 1) * (weight | 1)).sum())
    return total % _MODULUS


def piece_checksums(
    pieces: Sequence[Piece], parameters: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype
) -> list[int]:
    """The checksum of each piece, its elements as `dtype`: what the wire carries."""
    sums = []
    for piece in pieces:
        rect = piece.local
        values = matrix(parameters[piece.parameter])[rect.row0 : rect.row1, rect.col0 : rect.col1]
        sums.append(
            region_checksum(
                values.to(dtype), piece.rect.row0, piece.rect.col0, as_matrix(layout.tensors[piece.tensor])[1]
            )
        )
    return sums


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a parameter as rows x columns."""
    return tensor.view(as_matrix(tuple(tensor.shape)))


def tensor_checksums(layout: Layout, sums: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """The checksum of every canonical tensor from those of the pieces of `sums`' ranks.

    Args:
        sums: per rank, one checksum for each of its pieces, in the shard's order. Together the ranks hold the whole
            model.

    Raises:
        ValueError: two ranks hold different values of the same rectangle, or the ranks do not hold all of a tensor.
    """
    regions: dict[str, dict[Rect, tuple[int, int]]] = {name: {} for name in layout.tensors}
    for rank, values in sums.items():
        for piece, value in zip(layout.shard(rank).pieces, values, strict=True):
            first, known = regions[piece.tensor].setdefault(piece.rect, (rank, value))
            if known != value:
                raise ValueError(f"{layout.name}: {piece.tensor} {piece.rect} differs between ranks {first} and {rank}")
    for name, shape in layout.tensors.items():
        size = sum(rect.size for rect in regions[name])
        if size != math.prod(shape):
            raise ValueError(
                f"{layout.name}: the checksums of {name} speak for {size} of its {math.prod(shape)} elements"
            )
    return {name: sum(value for _, value in found.values()) % _MODULUS for name, found in regions.items()}


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
