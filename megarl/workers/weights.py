"""A trainer process's part in moving weights: loading, the sync to the rollout engine, saving a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.reshard import hf_files, transports
from megarl.reshard.checksum import piece_checksums
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, as_matrix
from megarl.reshard.plan import ReshardPlan

MAX_FILE_BYTES = 4 * 2**30
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class WeightSender:
    """Executes the sync plan from this rank's actor, into an embedded engine or into buckets that are handed on."""

    def __init__(
        self,
        plan: ReshardPlan,
        dtype: torch.dtype,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        embedded: bool,
    ) -> None:
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        self._executor = Executor(plan, dtype, rank, hosts, device, group, shared_memory=not embedded)
        self._plan, self._dtype, self._rank = plan, dtype, rank

    def load_bucket(self, bucket: int, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
        """Exchange a bucket and write it into the engine that lives in this process."""
        for rank, flat in self._executor.exchange(bucket, source).items():
            layout = self._executor.layout(bucket, rank)
            assert layout is not None, "a buffer came for a target that gets nothing"
            transports.copy_regions(target, layout.regions, flat)

    def export_bucket(self, bucket: int, source: Mapping[str, torch.Tensor]) -> dict[int, bytes]:
        """Exchange a bucket; per target rank that this process hosts, the payload for its engine's process. The memory
        behind a payload is overwritten by the next bucket."""
        payloads = {}
        for rank, flat in self._executor.exchange(bucket, source).items():
            layout = self._executor.layout(bucket, rank)
            assert layout is not None, "a buffer came for a target that gets nothing"
            payloads[rank] = transports.serialise_bucket(layout.regions, flat)
        return payloads

    def source_checksums(self, source: Mapping[str, torch.Tensor]) -> list[int]:
        """The checksums of this rank's pieces of the source layout."""
        return piece_checksums(self._plan.source.shard(self._rank).pieces, source, self._plan.source, self._dtype)

    def target_checksums(self, target: Mapping[str, torch.Tensor]) -> dict[int, list[int]]:
        """The checksums of the pieces of the embedded engine, read back from its own parameters."""
        layout = self._plan.target
        return {
            t: piece_checksums(layout.shard(t).pieces, target, layout, self._dtype) for t in self._executor.targets()
        }


def checksum_regions(layout: Layout, rank: int) -> list[transports.ChecksumRegion]:
    """What to sum of an engine rank's own parameters: one region for each piece of its shard, in order."""
    regions = []
    for piece in layout.shard(rank).pieces:
        local, rect = piece.local, piece.rect
        columns = as_matrix(layout.tensors[piece.tensor])[1]
        regions.append(
            transports.ChecksumRegion(
                piece.parameter, (local.row0, local.row1), (local.col0, local.col1), rect.row0, rect.col0, columns
            )
        )
    return regions


def save_hf(
    plan: ReshardPlan,
    dtype: torch.dtype,
    rank: int,
    num_processes: int,
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
    source_folder: str,
    folder: str,
    config: Mapping[str, Any],
) -> None:
    """Write the weights as a Hugging Face folder, ranks in parallel, with config and tokenizer beside them (rank 0)."""
    group = dist.group.WORLD if num_processes > 1 else None
    hf_files.FileSaver(plan, dtype, rank, num_processes, device, group).save(folder, parameters)
    if rank == 0:
        hf_files.copy_companions(
            source_folder,
            folder,
            change=lambda known: {**{k: v for k, v in known.items() if k != "torch_dtype"}, **config},
        )
    if num_processes > 1:
        dist.barrier()  # an index before its files would make half a checkpoint look whole
    if rank == 0:
        hf_files.write_index(folder, plan.target, plan.itemsize)


def load_hf(folder: str, target: Layout, rank: int, parameters: Mapping[str, torch.Tensor], source: Layout) -> None:
    """Read this rank's slices from a Hugging Face folder."""
    hf_files.load(folder, target, rank, parameters, source)


def wire_dtype(config: Config) -> torch.dtype:
    """The type that the engine's weights have, and so the wire's."""
    return TORCH_DTYPES[config.model.precision]


def compare_parameters(
    planned: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raises:
    ValueError: a parameter that the engine has and the plan lacks, or the other way round, or of another shape.
    """
    for name in sorted(planned.keys() | actual.keys()):
        if planned.get(name) != actual.get(name):
            raise ValueError(
                f"{where}: parameter {name} is {actual.get(name, 'missing')} in the engine, "
                f"{planned.get(name, 'missing')} in the plan"
            )
