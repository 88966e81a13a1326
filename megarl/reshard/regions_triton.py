"""The kernels of regions.py: one launch for any number of rectangles, led by a table of addresses in GPU memory.

A rectangle is cut into tiles of its elements, counted row by row; each program takes one tile. Copies between equal
types move words of up to 8 bytes, as far as all addresses and row lengths of the rectangle allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

COPY_TILE = 4096
SUM_TILE = 8192
MOST = 2**30
"""Elements of one table entry: the kernels count them in 32 bits."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
NUMBERS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


@triton.jit
def _copy(table, tiles, SOURCE: tl.constexpr, TARGET: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tiles + 2 * tl.program_id(0).to(tl.int64)
    entry = table + 6 * tl.load(tile)
    target = tl.load(entry).to(tl.pointer_type(TARGET))
    source = tl.load(entry + 1).to(tl.pointer_type(SOURCE))
    columns = tl.load(entry + 2).to(tl.int32)
    number = tl.load(tile + 1).to(tl.int32) + tl.arange(0, TILE)
    inside = number < tl.load(entry + 5).to(tl.int32)
    row = number // columns
    column = number - row * columns
    row = row.to(tl.int64)
    values = tl.load(source + row * tl.load(entry + 4) + column, mask=inside)
    tl.store(target + row * tl.load(entry + 3) + column, values.to(TARGET), mask=inside)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    table, tiles, sums, multiplier, SOURCE: tl.constexpr, WIRE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):
    tile = tiles + 2 * tl.program_id(0).to(tl.int64)
    entry = table + 8 * tl.load(tile)
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    columns = tl.load(entry + 1).to(tl.int32)
    number = tl.load(tile + 1).to(tl.int32) + tl.arange(0, TILE)
    inside = number < tl.load(entry + 3).to(tl.int32)
    row = number // columns
    column = number - row * columns
    row = row.to(tl.int64)
    values = tl.load(source + row * tl.load(entry + 2) + column, mask=inside, other=0.0).to(WIRE)
    bits = values.to(BITS, bitcast=True).to(tl.int64)
    position = (tl.load(entry + 4) + row) * tl.load(entry + 6) + tl.load(entry + 5) + column.to(tl.int64) + 1
    weight = position * multiplier
    weight = weight ^ (weight >> 29)
    parts = tl.where(inside, (bits + 1) * (weight | 1), 0)
    tl.atomic_add(sums + tl.load(entry + 7), tl.sum(parts, axis=0))


def copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """What copies sources[i] into targets[i] (see RegionCopies), enqueued on the current stream at every call."""
    groups: dict[tuple[tl.dtype, tl.dtype], list[list[int]]] = {}
    for whole_target, whole_source in zip(targets, sources, strict=True):
        for target, source in zip(_cut(whole_target), _cut(whole_source), strict=True):
            types, row = _copy_row(target, source)
            groups.setdefault(types, []).append(row)
    device = targets[0].device
    launches = []
    for (source_type, target_type), rows in groups.items():
        launches.append((source_type, target_type, *_tables(rows, [row[5] for row in rows], COPY_TILE, device)))

    def run() -> None:
        for source_type, target_type, table, tiles in launches:
            with torch.cuda.device(device):
                _copy[(len(tiles),)](table, tiles, SOURCE=source_type, TARGET=target_type, TILE=COPY_TILE, num_warps=8)

    return run


def _copy_row(target: Tensor, source: Tensor) -> tuple[tuple[tl.dtype, tl.dtype], list[int]]:
    """((type read, type written), [addresses, columns, row strides, size]), in elements of those types."""
    rows, columns = target.shape
    strides = [_row_stride(target), _row_stride(source)]
    if strides == [columns, columns]:
        rows, columns = 1, rows * columns
        strides = [columns, columns]
    addresses = [target.data_ptr(), source.data_ptr()]
    if target.dtype != source.dtype:
        return (NUMBERS[source.dtype], NUMBERS[target.dtype]), [*addresses, columns, *strides, rows * columns]
    size = target.element_size()
    lengths = [columns * size, *(stride * size for stride in strides if rows > 1), *addresses]
    word = next(word for word in WORDS if all(length % word == 0 for length in lengths))
    columns, *strides = (length * size // word for length in (columns, *strides))
    return (WORDS[word], WORDS[word]), [*addresses, columns, *strides, rows * columns]


def _cut(view: Tensor) -> Sequence[Tensor]:
    """The view in parts of whole rows, none with more than MOST elements; nothing of an empty one."""
    return view.split(max(MOST // view.shape[1], 1)) if view.numel() else ()


def _row_stride(view: Tensor) -> int:
    return view.stride(0) if view.shape[0] > 1 else view.shape[1]


def _tables(rows: list[list[int]], sizes: list[int], tile: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the rows, one [row, first element] a tile), int64 on the device."""
    counts = -(-np.array(sizes) // tile)
    index = np.repeat(np.arange(len(rows)), counts)
    first = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    tiles = np.stack([index, first], axis=1).astype(np.int64)
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.from_numpy(tiles).to(device)


def sums(
    regions: Sequence[tuple[Tensor, int, int, int]], dtype: torch.dtype, multiplier: int
) -> Callable[[], list[int]]:
    """What gives the checksums of regions (see RegionSums), modulo 2**64, at every call; waits for the GPU."""
    device = regions[0][0].device
    bits = WORDS[dtype.itemsize] if dtype.itemsize > 1 else tl.uint8
    groups: dict[torch.dtype, list[list[int]]] = {}
    for number, (whole, first_row, column, columns) in enumerate(regions):
        row = first_row
        for view in _cut(whole):
            place = [view.data_ptr(), view.shape[1], _row_stride(view), view.numel(), row, column, columns, number]
            groups.setdefault(whole.dtype, []).append(place)
            row += len(view)
    launches = []
    for source_type, rows in groups.items():
        launches.append((source_type, *_tables(rows, [row[3] for row in rows], SUM_TILE, device)))
    types = {"WIRE": NUMBERS[dtype], "BITS": bits}

    def run() -> list[int]:
        total = torch.zeros(len(regions), dtype=torch.int64, device=device)
        for source_type, table, tiles in launches:
            with torch.cuda.device(device):
                _sum[(len(tiles),)](
                    table, tiles, total, multiplier, SOURCE=NUMBERS[source_type], **types, TILE=SUM_TILE, num_warps=8
                )
        return [value % (1 << 64) for value in total.tolist()]

    return run
