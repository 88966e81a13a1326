"""Rectangles of every alignment, copied and summed: by torch on the CPU, by one kernel on a GPU."""

from __future__ import annotations

import pytest
import torch

from megarl.reshard.checksum import region_checksum
from megarl.reshard.regions import RegionCopies, RegionSums

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# (rows, columns of the whole, first and last row, first and last column)
RECTANGLES = [
    (40, 64, 0, 40, 0, 64),
    (40, 64, 3, 20, 8, 40),
    (40, 64, 3, 20, 5, 38),
    (300, 129, 1, 299, 0, 129),
    (9000, 1, 17, 8999, 0, 1),
    (7, 20000, 2, 3, 4, 19999),
    (5, 8, 2, 2, 0, 8),
]
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def rectangles(dtype: torch.dtype, device: str, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(whole matrices, views into them)."""
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(rows, columns, generator=generator).to(device, dtype) for rows, columns, *_ in RECTANGLES]
    views = [whole[a:b, c:d] for whole, (_, _, a, b, c, d) in zip(wholes, RECTANGLES, strict=True)]
    return wholes, views


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS)
def test_copies_write_the_rectangles_and_nothing_else(
    source_dtype: torch.dtype, target_dtype: torch.dtype, device: str
) -> None:
    wholes, targets = rectangles(target_dtype, device, 0)
    _, sources = rectangles(source_dtype, device, 1)
    wanted = [whole.clone() for whole in wholes]
    copies = RegionCopies(targets, sources)
    for _ in range(2):  # built once, run with what the sources hold then
        for source in sources:
            source.neg_()
        copies.run()
        for whole, source, (_, _, a, b, c, d) in zip(wanted, sources, RECTANGLES, strict=True):
            whole[a:b, c:d] = source.to(target_dtype)
        for whole, expected in zip(wholes, wanted, strict=True):
            assert torch.equal(whole, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_sums_are_the_checksums_of_the_rectangles(dtype: torch.dtype, wire: torch.dtype, device: str) -> None:
    _, views = rectangles(dtype, device, 2)
    regions = [(view, 3 * number, 2 * number, 30000 + number) for number, view in enumerate(views)]
    sums = RegionSums(regions, wire)
    for _ in range(2):
        for view in views:
            view.neg_()
        wanted = [region_checksum(view.to(wire).cpu(), *place) for view, *place in regions]
        assert sums.run() == wanted


@pytest.mark.gpu
def test_a_rectangle_of_more_elements_than_an_entry_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.reshard import regions_triton

    monkeypatch.setattr(regions_triton, "MOST", 1000)
    test_copies_write_the_rectangles_and_nothing_else(torch.bfloat16, torch.bfloat16, "cuda")
    test_sums_are_the_checksums_of_the_rectangles(torch.float32, torch.bfloat16, "cuda")
