"""The last hop of a weight transfer: from a trainer process into SGLang's own parameters, with no copy in between.

The producer packs regions into a flat buffer; `share` makes a handle of it (CUDA IPC, or a shared-memory file on the
CPU) that `open_shared` opens in another process. SGLang calls loaders of ours in each tensor-parallel rank's scheduler
process:

    channel.load_weights  takes the weights of one sync, bucket by bucket, and verifies them
    describe_parameters   tells which parameters SGLang has

A loader that raises takes SGLang's scheduler with it, and one that returns normally has no way to say more than
"Success". So each answers through a file that its envelope names: {"result": ...} or {"error": "..."}.

This module is imported by SGLang's scheduler processes: torch and the standard library only.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.multiprocessing import reductions

from megarl.reshard.regions import RegionCopies


@dataclass(frozen=True)
class BucketRegion:
    """Where a rectangle of a bucket goes: rows x columns of a parameter, ends exclusive, from a byte of the buffer.

    A parameter of one dimension has as many rows as elements, and one column; one of N dimensions has its last as
    columns and the product of the others as rows.

    BucketRegion("model.norm.weight", "float32", (0, 64), (0, 1), 1024)
    """

    parameter: str
    dtype: str
    """torch's name: float32, bfloat16."""
    rows: tuple[int, int]
    columns: tuple[int, int]
    offset: int
    """Bytes; a multiple of the dtype's size."""

    @property
    def nbytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0]) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ChecksumRegion:
    """A rectangle of one of SGLang's parameters, and its place in the canonical tensor with that many columns."""

    parameter: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    canonical_row: int
    canonical_column: int
    canonical_columns: int


@dataclass(frozen=True)
class ParameterInfo:
    """ParameterInfo(shape=(192, 64), dtype="float32")"""

    shape: tuple[int, ...]
    dtype: str


# ------------------------------------------------------------------------------------------------ buffers


def allocate_shareable(num_bytes: int, device: torch.device) -> Tensor:
    """A flat uint8 buffer that `share` can make handles of.

    CUDA memory must come from a plain allocation: expandable segments and torch_memory_saver cannot be shared.
    """
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if not buffer.is_cuda:
        with _sharing_by_name():
            buffer.share_memory_()
    return buffer


def share(flat: Tensor) -> bytes:
    """A handle on a buffer for one process on the same GPU (or, on the CPU, on the same node). It holds no weights.

    Make one for each process that opens it; `flat` must stay alive as long as any has it open.
    """
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"a bucket must be one contiguous dimension, but has shape {tuple(flat.shape)}")
    with _sharing_by_name():
        stream = io.BytesIO()
        ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(_handle(flat.detach()))
    return stream.getvalue()


def open_shared(handle: bytes) -> Tensor:
    """The buffer behind a handle of `share`. On a GPU this takes milliseconds: keep it.

    Raises:
        ValueError: it lies on a GPU that this process does not see.
    """
    shared = pickle.loads(handle)
    if isinstance(shared, Tensor):
        return shared
    device = _device_index(shared[_DEVICE_ARGUMENT])
    arguments = (*shared[:_DEVICE_ARGUMENT], device, *shared[_DEVICE_ARGUMENT + 1 :])
    opened: Tensor = reductions.rebuild_cuda_tensor(*arguments)
    return opened


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Share CPU memory by name: the default, by file descriptor, needs the consumer to be the producer's child."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


_DEVICE_ARGUMENT = 6
"""Where the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor hold the device."""


def _handle(flat: Tensor) -> Tensor | tuple[Any, ...]:
    """The tensor itself on the CPU; on a GPU torch's arguments to rebuild it, with the UUID in place of the index.

    An index means another GPU in a process that sees other devices (CUDA_VISIBLE_DEVICES).
    """
    if not flat.is_cuda:
        return flat
    _, arguments = reductions.reduce_tensor(flat)
    device = arguments[_DEVICE_ARGUMENT]
    if isinstance(device, int):  # else SGLang's monkey_patch_torch_reductions was here before
        device = str(torch.cuda.get_device_properties(device).uuid)
    return (*arguments[:_DEVICE_ARGUMENT], device, *arguments[_DEVICE_ARGUMENT + 1 :])


def _device_index(uuid: str) -> int:
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise ValueError(f"the bucket lies on GPU {uuid}, but this process sees only {', '.join(visible)}")
    return visible.index(uuid)


# ------------------------------------------------------------------------------------------------ envelopes


def describe_envelope(reply: str) -> str:
    """What `describe_parameters` gets as a tensor's name."""
    return json.dumps({"reply": reply})


def read_reply(path: str) -> Any:
    """The result that a loader wrote; the file is removed.

    Raises:
        RuntimeError: the loader failed, with its reason; or it never ran.
    """
    if not os.path.exists(path):
        raise RuntimeError("SGLang answered, but megarl's loader did not run")
    with open(path, encoding="utf-8") as file:
        reply = json.load(file)
    os.unlink(path)
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return reply["result"]


def answer(named_tensors: Sequence[tuple[str, Tensor]], work: Callable[[dict[str, Any]], Any]) -> None:
    """Run a loader's work and write its result, or why it failed, where its envelope says; whole or not at all."""
    ((name, _),) = named_tensors
    envelope = json.loads(name)
    try:
        reply = {"result": work(envelope)}
    except Exception as error:  # raising would end the scheduler process
        reply = {"error": reason(error)}
    partial = envelope["reply"] + ".partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(reply, file)
    os.replace(partial, envelope["reply"])


def reason(error: Exception) -> str:
    """An error as text for the other process: those that we raise speak for themselves, others need their type."""
    kind = type(error)
    is_ours = kind in (ValueError, RuntimeError) or kind.__module__.startswith("megarl.")
    return str(error) if is_ours else f"{kind.__name__}: {error}"


# ------------------------------------------------------------------------------------------------ loaders


def describe_parameters(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader that loads nothing. Result: {name: [shape, dtype]} of the model's parameters."""
    answer(named_tensors, lambda _: {n: [list(p.shape), dtype_name(p.dtype)] for n, p in model.named_parameters()})


def region_views(
    parameters: Mapping[str, Tensor], regions: Sequence[BucketRegion], flat: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Views of the parameters' rectangles, and of the same in a bucket, both [rows, columns].

    Raises:
        ValueError: names the parameter that is unknown, has another dtype, is too small, or is not stored row by row.
    """
    raw = flat.view(torch.uint8)
    targets, sources = [], []
    for region in regions:
        target = parameter_region(parameters, region.parameter, region.rows, region.columns)
        if dtype_name(target.dtype) != region.dtype:
            raise ValueError(
                f"{region.parameter}: is {dtype_name(target.dtype)} here, but the bucket brings {region.dtype}"
            )
        if region.offset % target.element_size():
            raise ValueError(f"{region.parameter}: byte {region.offset} is not aligned to {region.dtype}")
        source = raw[region.offset : region.offset + region.nbytes]
        if source.numel() != region.nbytes:
            raise ValueError(f"{region.parameter}: the bucket ends after {raw.numel()} bytes, inside the region")
        targets.append(target)
        sources.append(source.view(target.dtype).view(target.shape))
    return targets, sources


def copy_regions(parameters: Mapping[str, Tensor], regions: Sequence[BucketRegion], flat: Tensor) -> None:
    """Copy a bucket's regions into the parameters, in place. Nothing is written if any region is wrong. The copies are
    enqueued, not waited for.

    Raises:
        ValueError: as `region_views`.
    """
    RegionCopies(*region_views(parameters, regions, flat)).run()


def parameter_region(
    parameters: Mapping[str, Tensor], name: str, rows: Sequence[int], columns: Sequence[int]
) -> Tensor:
    """A view [rows, columns] of a parameter seen as a matrix.

    Raises:
        ValueError: names the parameter that is unknown, too small, or not stored row by row.
    """
    if name not in parameters:
        close = difflib.get_close_matches(name, parameters, n=1)
        raise ValueError(
            f"{name}: the engine has no such parameter" + (f"; the nearest is {close[0]}" if close else "")
        )
    parameter = parameters[name].data
    if not parameter.is_contiguous():
        raise ValueError(
            f"{name}: is not stored row by row (strides {parameter.stride()}); its backend repacks weights"
        )
    shape = parameter.shape
    matrix = parameter.view(-1, shape[-1]) if parameter.dim() > 1 else parameter.view(-1, 1)
    for what, (start, end), size in (("rows", rows, matrix.shape[0]), ("columns", columns, matrix.shape[1])):
        if not 0 <= start <= end <= size:
            raise ValueError(f"{name}: {what} {start} to {end} are not in its {size} {what} (shape {tuple(shape)})")
    return matrix[rows[0] : rows[1], columns[0] : columns[1]]


def parse_description(result: Mapping[str, Sequence[Any]]) -> dict[str, ParameterInfo]:
    """The result of `describe_parameters` as {"model.norm.weight": ParameterInfo((64,), "float32")}."""
    return {name: ParameterInfo(tuple(shape), dtype) for name, (shape, dtype) in result.items()}


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
