"""Many rectangles at once: copied, or summed. Built once from views, and run at every weight sync.

Imported by SGLang's scheduler processes: torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.reshard.checksum import MULTIPLIER, region_checksum

Region = tuple[Tensor, int, int, int]
"""A view [rows, columns], where its upper left corner lies in the canonical tensor (row, column), and how many columns
that has."""


class RegionCopies:
    """Copies sources[i] into targets[i], casting where their types differ."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """
        Args:
            targets, sources: views [rows, columns] of pairwise the same shape, stored row by row with neighbouring
                columns next to each other (or of one column).
        """
        self._targets, self._sources = list(targets), list(sources)
        self._kernel = None
        if targets and targets[0].is_cuda:
            from megarl.reshard import regions_triton

            self._kernel = regions_triton.copies(self._targets, self._sources)

    def run(self) -> None:
        """Enqueue the copies on the current stream."""
        if self._kernel is not None:
            self._kernel()
        elif self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)


class RegionSums:
    """The checksums of regions, as `checksum.region_checksum` defines them."""

    def __init__(self, regions: Sequence[Region], dtype: torch.dtype) -> None:
        """
        Args:
            dtype: elements are cast to it first: what the wire carries.
        """
        self._regions, self._dtype = list(regions), dtype
        self._kernel = None
        if regions and regions[0][0].is_cuda:
            from megarl.reshard import regions_triton

            self._kernel = regions_triton.sums(self._regions, dtype, MULTIPLIER)

    def run(self) -> list[int]:
        """One number from 0 to 2**64 - 1 a region."""
        if self._kernel is not None:
            return self._kernel()
        return [region_checksum(view.to(self._dtype), *place) for view, *place in self._regions]
