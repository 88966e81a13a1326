"""Hugging Face folder to Megatron checkpoint and back, by the layouts and plans that training uses."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.model.families import declare_role
from megarl.model.hf_config import Precision
from megarl.ops.commands import Steps
from megarl.ops.folders import HF_SUBFOLDER, Model, Weights, build, check_out, choose_parallel, read, written
from megarl.parallel import device
from megarl.reshard import hf_files
from megarl.reshard.layouts import hf_files_layout
from megarl.reshard.plan import Place, plan
from megarl.workers import weights as worker_weights


def hf_to_megatron(
    source: Weights,
    out: str,
    precision: Precision | None,
    parallel: ParallelConfig | None,
    overwrite: bool,
    deadline: float,
    steps: Steps,
) -> Model:
    """Write a Megatron checkpoint of the weights alone, with config and tokenizer beside it. Collective."""
    check_out(out, overwrite, [source.folder])
    model = _model(source, precision, parallel, deadline, steps)
    with written(out) as folder:
        with steps.waiting(f"writing {out}"):
            model.engine.save(folder)
        if model.rank == 0:
            hf_files.copy_companions(source.hf_folder, os.path.join(folder, HF_SUBFOLDER))
    return model


def megatron_to_hf(
    source: Weights,
    out: str,
    precision: Precision | None,
    parallel: ParallelConfig | None,
    overwrite: bool,
    deadline: float,
    steps: Steps,
) -> Model:
    """Write a Hugging Face folder: safetensors, index, config and tokenizer. Collective."""
    check_out(out, overwrite, [source.folder, source.hf_folder])
    model = _model(source, precision, parallel, deadline, steps)
    declaration, world = declare_role(source.role, source.hf_config), dist.get_world_size()
    num_files = hf_files.num_files(declaration.tensors(), model.dtype.itemsize, worker_weights.MAX_FILE_BYTES)
    target = hf_files_layout(declaration, num_files)
    places = _places(range(world))
    hosts = _places(hf_files.file_hosts(target.num_ranks, world))
    save_plan = plan(model.layout, target, model.dtype.itemsize, places, hosts)
    with written(out) as folder, steps.watching(f"writing {out}", model.engine.parameters()) as parameters:
        worker_weights.save_hf(
            save_plan,
            model.dtype,
            model.rank,
            world,
            device.device(),
            parameters,
            source.hf_folder,
            folder,
        )
    return model


def _model(
    source: Weights, precision: Precision | None, parallel: ParallelConfig | None, deadline: float, steps: Steps
) -> Model:
    sizes = choose_parallel(source, parallel, dist.get_world_size())
    model = build(source, sizes, source.precision(precision), deadline, steps)
    read(model, steps)
    return model


def _places(processes: Sequence[int]) -> list[Place]:
    return [Place(0, process) for process in processes]
