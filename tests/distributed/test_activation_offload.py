"""Activation offloading changes no number, whatever passes follow each other.

It needs a GPU and Transformer Engine. What can go wrong without either is the bookkeeping of Megatron's manager, so
here the copies go from host to host, with the few calls that only CUDA has left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from harness import run
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from training_task import (
    ADAM,
    SHAPES,
    TEMPERATURE,
    Case,
    Outcome,
    Task,
    batches_of,
    joined,
    own_samples,
    relative_error,
    task_of,
    train_case,
)

from megarl.config import ParallelConfig, RecomputeConfig
from megarl.engines.megatron import MegatronEngine
from megarl.model import hf_config

MODULES = ["qkv_linear", "core_attn", "attn_proj"]
CASES = [
    Case("packed in 4", "token-mean", len(SHAPES)),
    Case("packed in 1", "token-mean", len(SHAPES)),
    Case("padded, 4", "token-mean", 4),
]


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(transformer_engine, "cpu_offload", SimpleNamespace()))
        stack.enter_context(mock.patch.object(hf_config, "check_offload"))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        yield


def offloaded() -> dict[str, int]:
    """Bytes of each module in the last pass."""
    found: dict[str, int] = {}
    for chunk in PipelineOffloadManager.get_instance()._cached_chunks_forward:
        for group in chunk.offload_groups:
            found[group._name] = found.get(group._name, 0) + group.total_offload_bytes
    return found


def engine_of(task: Task, parallel: ParallelConfig, modules: Sequence[str], recompute: Any) -> MegatronEngine:
    engine = MegatronEngine(
        task.role,
        task.model.config,
        parallel,
        "fp32",
        ADAM,
        recompute=recompute,
        offload_activations=modules,
        timeout=30,
        chunk_size=16,
    )
    engine.chunks[0].config.min_offloaded_tensor_size = 1
    return engine


def turns(parallel: ParallelConfig, modules: Sequence[str], recompute: Any) -> tuple[dict[str, list[Outcome]], Any]:
    """Actor and critic take turns, each with forward-only passes and other micro-batches each time."""
    outcomes: dict[str, list[Outcome]] = {"actor": [], "critic": []}
    moved = []
    with without_cuda():
        tasks = [task_of("actor", False), task_of("critic", False)]
        engines = [engine_of(task, parallel, modules, recompute) for task in tasks]
        for case in CASES:
            for engine, task in zip(engines, tasks, strict=True):
                outcomes[task.role].append(train_case(engine, task, case))
                if modules:
                    moved.append(offloaded())
                    own = own_samples(case, engine.groups.coordinates.data, 1)
                    engine.forward(batches_of(task, case, parallel, own), TEMPERATURE)
                    assert not offloaded(), "a pass without backward keeps nothing, so nothing is to be moved"
    return outcomes, moved


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "recompute"),
    [
        (1, ParallelConfig(), None),
        (1, ParallelConfig(), RecomputeConfig(kind="selective", modules=["layernorm", "mlp"])),
        (2, ParallelConfig(pipeline=2), None),
        (2, ParallelConfig(pipeline=2, virtual_pipeline=2), None),
        (2, ParallelConfig(tensor=2, sequence=True), None),
    ],
    ids=["one", "recompute", "pp2", "vpp2", "tp2sp"],
)
def test_offloading_changes_no_number(num_ranks: int, parallel: ParallelConfig, recompute: Any) -> None:
    plain = run(turns, num_ranks, parallel, [], recompute)
    moved = run(turns, num_ranks, parallel, MODULES, recompute)
    for rank, (_, of_pass) in enumerate(moved):
        for number, found in enumerate(of_pass):
            assert sorted(found) == sorted(MODULES), f"rank {rank}, pass {number}"
            assert all(found.values()), f"rank {rank}, pass {number}: {found}"
    for role in ("actor", "critic"):
        for number in range(len(CASES)):
            task = task_of(role, False)
            wanted, found = (
                joined(task, parallel, [outcomes[role][number] for outcomes, _ in ranks]) for ranks in (plain, moved)
            )
            assert found.sums == wanted.sums
            for name, gradient in wanted.gradients.items():
                assert relative_error(found.gradients[name], gradient) < 1e-6, f"{role}, {CASES[number]}: {name}"
                assert np.isfinite(found.weights[name]).all()


def test_without_transformer_engine_it_is_refused() -> None:
    with pytest.raises(ValueError, match="offload.activations is core_attn, but it needs a GPU, .* leave it out"):
        hf_config.transformer_config(
            task_of("actor", False).model.config, ParallelConfig(), offload_activations=["core_attn"]
        )
