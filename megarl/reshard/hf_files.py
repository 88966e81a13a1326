"""Hugging Face folders as a source and a target of plans: ranks read only their slices, and write files in parallel."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.reshard.checksum import matrix
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, Rect, Shape
from megarl.reshard.plan import Copy, Place, ReshardPlan, plan
from megarl.reshard.transports import copy_regions

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def tensor_files(folder: str) -> dict[str, str]:
    """Which file of a checkpoint holds which tensor.

    Raises:
        FileNotFoundError: the folder has neither model.safetensors nor an index.
    """
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        with open(index) as file:
            return {name: os.path.join(folder, part) for name, part in json.load(file)["weight_map"].items()}
    single = os.path.join(folder, SINGLE)
    if not os.path.isfile(single):
        raise FileNotFoundError(
            f"no {SINGLE} and no {INDEX} in {folder}; megarl reads safetensors only (pickle files can run code)"
        )
    return dict.fromkeys(_shapes(single), single)


def _shapes(path: str) -> dict[str, Shape]:
    """The tensors of one file and their shapes, from its header.

    Raises:
        ValueError: the file is missing, cut off or no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            names = list(opened.keys())
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; copy or download it again") from error


def check_tensors(folder: str, tensors: Mapping[str, Shape]) -> None:
    """The checkpoint has every tensor of the model in its shape, and none that the model does not know.

    Raises:
        ValueError: naming the first missing, misshapen or extra tensor, or the file that cannot be read.
    """
    files = tensor_files(folder)
    found = {path: _shapes(path) for path in sorted(set(files.values()))}
    for name, shape in tensors.items():
        actual = found[files[name]].get(name) if name in files else None
        if actual is None:
            raise ValueError(f"{folder}: tensor {name} {list(shape)} is missing")
        if actual != shape:
            raise ValueError(f"{folder}: tensor {name} is {list(actual)}, the model needs {list(shape)}")
    for shapes in found.values():
        for name, actual in shapes.items():
            if name not in tensors and not _ignorable(name, tensors):
                raise ValueError(f"{folder}: tensor {name} {list(actual)} is not part of the model")


def _ignorable(name: str, tensors: Mapping[str, Shape]) -> bool:
    """Tensors that some exporters write though the model derives them: rotary tables, a tied model's output layer."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and "lm_head.weight" not in tensors)


def load(folder: str, target: Layout, rank: int, parameters: Mapping[str, torch.Tensor], source: Layout) -> None:
    """Fill one rank's parameters from a checkpoint, reading only the slices that they need. No communication.

    Args:
        source: the layout of the whole files (`hf_layout` with one copy).
    """
    check_tensors(folder, source.tensors)
    load_plan = plan(source, _only(target, rank), 1, target_places=[Place(0, 0)])
    files = tensor_files(folder)
    by_file: dict[str, list[Copy]] = {}
    for copy in load_plan.copies:
        by_file.setdefault(files[copy.tensor], []).append(copy)
    for path, copies in by_file.items():
        with safe_open(path, framework="pt") as opened, torch.no_grad():
            for copy in copies:
                place = copy.target
                values = read_rectangle(opened, copy.tensor, source.tensors[copy.tensor], copy.rect)
                local = matrix(parameters[copy.target_parameter].data)
                local[place.row0 : place.row1, place.col0 : place.col1].copy_(values)


def read_rectangle(opened: Any, name: str, shape: Shape, rect: Rect) -> torch.Tensor:
    """A rectangle of a canonical tensor, [rows, columns], out of an open file; no more than its rows are read."""
    part = opened.get_slice(name)
    if len(shape) == 2:
        values: torch.Tensor = part[rect.row0 : rect.row1, rect.col0 : rect.col1]
        return values
    return matrix(part[rect.row0 : rect.row1])[:, rect.col0 : rect.col1]


def _only(layout: Layout, rank: int) -> Layout:
    """The layout as one rank sees it: plans for a single rank stay small on large grids."""
    return Layout(layout.name, layout.tensors, (layout.shard(rank),), (0,))


def num_files(tensors: Mapping[str, Shape], itemsize: int, max_bytes: int) -> int:
    """How many files a checkpoint is split into so that each holds about max_bytes."""
    return max(1, -(-sum(math.prod(s) for s in tensors.values()) * itemsize // max_bytes))


def file_hosts(num_files: int, num_processes: int) -> list[int]:
    """Which process writes each file: spread evenly."""
    return [file * num_processes // num_files for file in range(num_files)]


class FileSaver:
    """One process's part in writing a checkpoint: it takes part in every exchange, and writes the files it hosts."""

    def __init__(
        self,
        save_plan: ReshardPlan,
        dtype: torch.dtype,
        rank: int,
        num_processes: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan, self.dtype = save_plan, dtype
        hosts = file_hosts(save_plan.target.num_ranks, num_processes)
        self.executor = Executor(save_plan, dtype, rank, hosts, device, group)

    def save(self, folder: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Write this process's files. All processes of the group call it. Returns the files' names."""
        os.makedirs(folder, exist_ok=True)
        target = self.plan.target
        whole = {
            t: {n: torch.empty(s, dtype=self.dtype) for n, s in target.shard(t).parameters.items()}
            for t in self.executor.targets()
        }
        buffers = self.executor.allocate()
        for bucket in range(self.executor.num_buckets):
            self.executor.exchange(bucket, parameters, buffers)
            for rank, flat in buffers.items():
                layout = self.executor.layout(bucket, rank)
                if layout is not None:
                    copy_regions(whole[rank], layout.regions, flat[: layout.num_bytes].cpu())
        for rank, tensors in whole.items():
            path = os.path.join(folder, file_name(rank, target.num_ranks))
            save_file(tensors, path + ".tmp", metadata={"format": "pt"})
            os.replace(path + ".tmp", path)
        return [file_name(rank, target.num_ranks) for rank in whole]


def file_name(file: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{file + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: str, target: Layout, itemsize: int) -> None:
    """The index of a checkpoint of several files, as transformers writes it. Where there is one file, an index that an
    earlier checkpoint left is removed: it would be read first."""
    if target.num_ranks == 1:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, INDEX))
        return
    weight_map = {
        name: file_name(rank, target.num_ranks)
        for rank in range(target.num_ranks)
        for name in target.shard(rank).parameters
    }
    total = sum(math.prod(s) for s in target.tensors.values()) * itemsize
    with open(os.path.join(folder, INDEX), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=2, sort_keys=True)


def copy_companions(
    source: str,
    folder: str,
    names: Iterable[str] | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Copy what lies beside the weights (config, tokenizer, generation config); `change` edits config.json."""
    os.makedirs(folder, exist_ok=True)
    wanted: Sequence[str] = (
        sorted(names) if names is not None else [n for n in sorted(os.listdir(source)) if _is_companion(n)]
    )
    for name in wanted:
        path = os.path.join(source, name)
        if name == "config.json" and change is not None:
            with open(path) as file:
                config = change(json.load(file))
            with open(os.path.join(folder, name), "w") as file:
                json.dump(config, file, indent=2)
        elif os.path.isfile(path):
            shutil.copy2(path, os.path.join(folder, name))


def _is_companion(name: str) -> bool:
    return name.endswith((".json", ".txt", ".model", ".jinja", ".tiktoken")) and not name.endswith(".index.json")
