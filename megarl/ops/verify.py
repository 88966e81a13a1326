"""Two folders of weights compared bit for bit, canonical tensor by canonical tensor.

Where both are Hugging Face folders a few rows of a tensor are read at a time. A Megatron checkpoint is held by the
ranks, and its tensors come bucket by bucket, each to the rank that compares it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from megarl.config import ParallelConfig
from megarl.model.families import declare_role
from megarl.model.hf_config import DTYPES, Precision
from megarl.ops.commands import Steps
from megarl.ops.folders import Weights, build, choose_parallel, read
from megarl.parallel import device
from megarl.reshard import hf_files
from megarl.reshard.checksum import bits, region_checksum
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, Rect, Shape, as_matrix
from megarl.reshard.layouts import hf_files_layout
from megarl.reshard.plan import Place, plan

CHUNK = 1 << 24
"""Elements compared at once."""

Values = Callable[[str, Rect], torch.Tensor]
"""A rectangle of a canonical tensor as [rows, columns], on the CPU, in the type of the comparison."""


@dataclass
class Comparison:
    """What is known of one canonical tensor."""

    shape: Shape
    num_different: int = 0
    first: int = -1
    """Of the elements that differ, the first's number, row by row."""
    values: tuple[float, float] = (0.0, 0.0)
    """Both sides' there."""
    checksums: tuple[int, int] = (0, 0)

    @property
    def index(self) -> list[int]:
        return [int(i) for i in np.unravel_index(self.first, self.shape)]

    def add(self, rect: Rect, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare a rectangle of it."""
        columns = as_matrix(self.shape)[1]
        different = bits(a) != bits(b)
        count = int(different.sum())
        sums = [region_checksum(values, rect.row0, rect.col0, columns) for values in ((a, b) if count else (a,))]
        self.checksums = ((self.checksums[0] + sums[0]) % 2**64, (self.checksums[1] + sums[-1]) % 2**64)
        if not count:
            return
        row, column = divmod(int(different.flatten().int().argmax()), rect.num_cols)
        number = (rect.row0 + row) * columns + rect.col0 + column
        if not self.num_different or number < self.first:
            self.first, self.values = number, (float(a[row, column]), float(b[row, column]))
        self.num_different += count


@dataclass(frozen=True)
class Result:
    dtype: torch.dtype
    tensors: dict[str, Comparison]

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def different(self) -> dict[str, Comparison]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.num_different}

    def checksum(self, side: int) -> str:
        """Of all tensors of a side, by the checksum of each that every weight sync compares."""
        text = "".join(f"{name} {tensor.checksums[side]}\n" for name, tensor in self.tensors.items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def common_dtype(a: Weights, b: Weights, precision: Precision | None) -> torch.dtype:
    """The type to compare in: what was asked for, else the narrower of the two.

    Raises:
        ValueError: a folder has several types, or one that the tools do not keep.
    """
    return DTYPES[precision] if precision else min(a.dtype(), b.dtype(), key=lambda dtype: dtype.itemsize)


def compare(
    a: Weights,
    b: Weights,
    precision: Precision | None,
    parallel: ParallelConfig | None,
    deadline: float,
    steps: Steps,
) -> Result:
    """Compare all tensors; the same on every rank. Collective.

    Raises:
        ValueError: the two have other tensors or shapes, or types that have no common one.
    """
    _check_alike(a, b)
    dtype = common_dtype(a, b, precision)
    world = dist.get_world_size()
    target = hf_files_layout(declare_role(a.role, a.hf_config), world)
    hosts = hf_files.file_hosts(target.num_ranks, world)
    sides = [
        _HFSide(w, dtype) if w.is_hf else _MegatronSide(w, dtype, target, hosts, parallel, deadline, steps)
        for w in (a, b)
    ]
    own = [name for rank, host in enumerate(hosts) if host == dist.get_rank() for name in target.shard(rank).parameters]
    found = {name: Comparison(target.tensors[name]) for name in own}
    leading = next((side for side in sides if isinstance(side, _MegatronSide)), None)
    rectangles = leading.rectangles(sides) if leading is not None else _rows(found)
    with steps.counting("comparing", sum(math.prod(tensor.shape) for tensor in found.values())) as advance:
        for name, rect in rectangles:
            found[name].add(rect, *(side.values(name, rect) for side in sides))
            advance(rect.size)
    of_ranks: list[dict[str, Comparison]] = [{}] * world
    dist.all_gather_object(of_ranks, found)
    every = {name: tensor for of_rank in of_ranks for name, tensor in of_rank.items()}
    return Result(dtype, {name: every[name] for name in target.tensors})


def _check_alike(a: Weights, b: Weights) -> None:
    if a.role != b.role:
        raise ValueError(f"{a.folder} is of role {a.role}, {b.folder} of role {b.role}; nothing to compare")
    ours, theirs = a.tensors, b.tensors
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            shapes = [list(side[name]) if name in side else "missing" for side in (ours, theirs)]
            raise ValueError(f"tensor {name} is {shapes[0]} in {a.folder}, {shapes[1]} in {b.folder}: other models")
    for name in ("num_attention_heads", "num_key_value_heads"):
        ours_here, theirs_here = getattr(a.hf_config, name), getattr(b.hf_config, name)
        if ours_here != theirs_here:
            raise ValueError(f"{name} is {ours_here} in {a.hf_folder}, {theirs_here} in {b.hf_folder}: other models")


def _rows(tensors: dict[str, Comparison]) -> Iterator[tuple[str, Rect]]:
    """All of them, a few rows at a time."""
    for name, tensor in tensors.items():
        rows, columns = as_matrix(tensor.shape)
        step = max(CHUNK // columns, 1)
        for row in range(0, rows, step):
            yield name, Rect(row, min(row + step, rows), 0, columns)


class _HFSide:
    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._files, self._dtype = hf_files.tensor_files(weights.folder), dtype
        self._shapes = weights.tensors

    def values(self, name: str, rect: Rect) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as opened:  # maps the file, and gives it back
            return hf_files.read_rectangle(opened, name, self._shapes[name], rect).to(self._dtype)


class _MegatronSide:
    """The tensors come in buckets: `rectangles` fetches them for all such sides together, in the same order."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        target: Layout,
        hosts: list[int],
        parallel: ParallelConfig | None,
        deadline: float,
        steps: Steps,
    ) -> None:
        world = dist.get_world_size()
        precision = next(name for name, known in DTYPES.items() if known == dtype)
        model = build(weights, choose_parallel(weights, parallel, world), precision, deadline, steps)  # type: ignore[arg-type]
        read(model, steps)
        places = [Place(0, rank) for rank in range(world)]
        made = plan(model.layout, target, dtype.itemsize, places, [places[host] for host in hosts])
        self._parameters = model.engine.parameters()
        group = dist.group.WORLD if world > 1 else None
        self._executor = Executor(made, dtype, model.rank, hosts, device.device(), group)
        self._buffers = self._executor.allocate()
        self._dtype, self._found = dtype, dict[tuple[str, Rect], torch.Tensor]()

    def rectangles(self, sides: list[_HFSide | _MegatronSide]) -> Iterator[tuple[str, Rect]]:
        fetching = [side for side in sides if isinstance(side, _MegatronSide)]
        for bucket in range(self._executor.num_buckets):
            for side in fetching:
                side._fetch(bucket)
            yield from list(self._found)

    def _fetch(self, bucket: int) -> None:
        self._executor.exchange(bucket, self._parameters, self._buffers)
        self._found.clear()
        for rank, buffer in self._buffers.items():
            layout = self._executor.layout(bucket, rank)
            if layout is None:
                continue
            flat = buffer[: layout.num_bytes].cpu()
            for region in layout.regions:
                rect = Rect(*region.rows, *region.columns)
                values = flat[region.offset : region.offset + region.nbytes].view(self._dtype)
                self._found[region.parameter, rect] = values.view(rect.num_rows, rect.num_cols)

    def values(self, name: str, rect: Rect) -> torch.Tensor:
        return self._found[name, rect]
