"""What a Megatron checkpoint holds, by its index alone: no weight is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

INDEX = "metadata.json"
"""Written last: a folder without it holds no whole checkpoint."""

_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """What `MegatronEngine.save` wrote into a folder."""

    folder: str
    tensors: Mapping[str, StoredTensor]
    """The model's. Layers of one kind are stacked: decoder.layers.mlp.linear_fc2.weight is [layers, H, F]."""
    objects: frozenset[str]
    """Whatever else the model has: `_extra_state` of Transformer Engine's modules, and of those that stand for them."""
    has_optimizer: bool

    @property
    def is_critic(self) -> bool:
        """Whether the output layer is a value head."""
        output = self.tensors.get("output_layer.weight")
        return output is not None and output.shape[0] == 1

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(tensor.dtype for tensor in self.tensors.values())


def is_stored(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, INDEX))


def read_stored(folder: str) -> Stored:
    """
    Raises:
        FileNotFoundError: the folder holds no checkpoint.
        ValueError: its index or one of its files is missing or cut off.
    """
    if not is_stored(folder):
        raise FileNotFoundError(f"no Megatron checkpoint in {folder}: it has no {INDEX}")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # a cut pickle raises almost anything
        raise ValueError(f"{folder}/.metadata cannot be read: {error}; copy the checkpoint again") from error
    _check_files(folder, metadata)
    model = {key: found for key, found in metadata.state_dict_metadata.items() if not _OPTIMIZER.search(key)}
    tensors = {
        key: StoredTensor(tuple(found.size), found.properties.dtype)
        for key, found in model.items()
        if isinstance(found, TensorStorageMetadata)
    }
    has_optimizer = len(model) < len(metadata.state_dict_metadata)
    return Stored(folder, tensors, frozenset(model.keys() - tensors.keys()), has_optimizer)


def _check_files(folder: str, metadata: Metadata) -> None:
    """Every file is as long as the index needs: one that is cut off is named before hours of reading."""
    needed: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        path = os.path.join(folder, name)
        actual = os.path.getsize(path) if os.path.isfile(path) else None
        if actual is None or actual < size:
            found = "is missing" if actual is None else f"has {actual:,} bytes, the index counts {size:,}"
            raise ValueError(f"{path} {found}; copy the checkpoint again")
