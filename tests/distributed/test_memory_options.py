"""What saves memory or hides communication changes no number: recompute and the overlap options."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import run
from reference_weights import tiny_model
from training_task import (
    ADAM,
    SHAPES,
    TEMPERATURE,
    Case,
    Task,
    batches_of,
    joined,
    objective_of,
    own_samples,
    relative_error,
    task_of,
    train_all,
)

from megarl.config import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.engines import optimizer
from megarl.engines.megatron import MegatronEngine
from megarl.model.gpt import check_recomputed, local_parameters
from megarl.model.hf_config import transformer_config

CASE = Case("packed in 4", "token-mean", len(SHAPES))


# ------------------------------------------------------------------------------------------------ recompute

RECOMPUTE = {
    "full, each layer": RecomputeConfig(kind="full"),
    "full, two at once": RecomputeConfig(kind="full", num_layers=2),
    "block of one": RecomputeConfig(kind="block"),
    "core_attn": RecomputeConfig(kind="selective"),
    "mlp": RecomputeConfig(kind="selective", modules=["mlp"]),
    "layernorm": RecomputeConfig(kind="selective", modules=["layernorm"]),
    "all modules": RecomputeConfig(kind="selective", modules=["core_attn", "mlp", "layernorm"]),
}


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (1, ParallelConfig()),
        (2, ParallelConfig(tensor=2, sequence=True)),
        (2, ParallelConfig(context=2)),
        (2, ParallelConfig(pipeline=2)),
    ],
    ids=["one", "tp2sp", "cp2", "pp2"],
)
def test_recompute_changes_no_number(num_ranks: int, parallel: ParallelConfig) -> None:
    actor, critic = task_of("actor", True), task_of("critic", False)
    work = [(actor, parallel, [CASE]), (critic, parallel, [CASE])]
    work += [(actor, parallel, [CASE], {"recompute": recompute}) for recompute in RECOMPUTE.values()]
    work += [(critic, parallel, [CASE], {"recompute": RECOMPUTE["all modules"]})]
    of_rank = run(train_all, num_ranks, work)
    made = [joined(item[0], parallel, [outcomes[n][0] for outcomes in of_rank]) for n, item in enumerate(work)]
    wanted = {"actor": made[0], "critic": made[1]}
    for name, item, found in zip([*RECOMPUTE, "critic"], work[2:], made[2:], strict=True):
        reference = wanted[item[0].role]
        errors = {n: relative_error(found.gradients[n], gradient) for n, gradient in reference.gradients.items()}
        # To the bit, but for the norms: their gradient and the residual's are then added in another order.
        limit = 5e-6 if "layernorm" in name or name in ("all modules", "critic") else 0.0
        assert max(errors.values()) <= limit, f"{name}: {max(errors, key=errors.__getitem__)}"


def layers_run(recompute: RecomputeConfig | None) -> list[int]:
    """How often each layer, its norm in front, its attention core and its MLP ran in one training step with one
    micro-batch: summed over the layers."""
    task = task_of("actor", True)
    engine = MegatronEngine(
        "actor", task.model.config, ParallelConfig(), "fp32", ADAM, recompute=recompute, compiles=False, timeout=30
    )
    counts = [0] * 4
    for layer in engine.chunks[0].module.decoder.layers:
        parts = (layer, layer.input_layernorm, layer.self_attention.core_attention, layer.mlp)
        for place, part in enumerate(parts):
            part.register_forward_hook(functools.partial(_count, counts, place))
    case = Case("packed in 1", "token-mean", len(SHAPES))
    batches = batches_of(task, case, engine.parallel, range(len(SHAPES)))
    engine.train_step(batches, objective_of("actor"), 0.1, TEMPERATURE, with_entropy=True)
    return counts


def _count(counts: list[int], place: int, *unused: Any) -> None:
    counts[place] += 1


def all_layers_run() -> dict[str, list[int]]:
    return {name: layers_run(recompute) for name, recompute in [("none", None), *RECOMPUTE.items()]}


def test_what_is_named_runs_twice_and_nothing_else() -> None:
    (found,) = run(all_layers_run, 1)
    assert found == {
        "none": [4, 4, 4, 4],
        "full, each layer": [8, 8, 8, 8],
        "full, two at once": [8, 8, 8, 8],
        "block of one": [5, 5, 5, 5],
        "core_attn": [4, 4, 8, 4],
        "mlp": [4, 4, 4, 8],
        "layernorm": [4, 8, 4, 4],
        "all modules": [4, 8, 8, 8],
    }


def test_a_module_that_no_layer_has_is_refused() -> None:
    """As of dense layers under Transformer Engine."""
    flags = {"recompute_input_layernorm": False, "recompute_pre_mlp_layernorm": False, "recompute_mlp": True}
    dense = SimpleNamespace(**flags, mlp=None)
    check_recomputed(["core_attn", "mlp"], [dense])
    for name in ("layernorm", "moe"):
        with pytest.raises(ValueError, match=f"has {name}, but no layer has"):
            check_recomputed(["mlp", name], [dense])


def experts() -> Task:
    return replace(task_of("actor", False), model=tiny_model("qwen3_moe"))


def gradients_of_experts(
    parallel: ParallelConfig, recompute: RecomputeConfig | None
) -> tuple[dict[str, np.ndarray], int]:
    """This rank's gradients, and how often its layers of experts ran."""
    config = OptimizerConfig(kind="sgd", clip_grad=0.0)
    task = experts()
    engine = MegatronEngine(
        "actor", task.model.config, parallel, "fp32", config, recompute=recompute, seed=3, timeout=30
    )
    counts = [0]
    for layer in engine.chunks[0].module.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(functools.partial(_count, counts, 0))
    own = own_samples(CASE, engine.groups.coordinates.data, engine.groups.grid.data_parallel_size)
    batches = batches_of(task, CASE, parallel, own)
    engine.train_step(batches, objective_of("actor"), 0.0, TEMPERATURE, with_entropy=True)
    gradients = {name: p.main_grad.numpy().copy() for name, p in local_parameters(engine.chunks).items()}
    return gradients, counts[0]


def recompute_of_experts(parallel: ParallelConfig) -> list[tuple[dict[str, np.ndarray], int]]:
    modules = RecomputeConfig(kind="selective", modules=["core_attn", "mlp", "moe", "layernorm"])
    return [gradients_of_experts(parallel, recompute) for recompute in (None, modules, RecomputeConfig(kind="full"))]


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(expert=2), ParallelConfig(pipeline=2, virtual_pipeline=2)], ids=["ep2", "vpp2"]
)
def test_recompute_of_experts_changes_no_number(parallel: ParallelConfig) -> None:
    """Of a model with dense layers between: under pipeline parallel one rank has them all."""
    of_rank = run(recompute_of_experts, 2, parallel)
    for (wanted, once), *recomputed in of_rank:
        for found, twice in recomputed:
            assert twice == 2 * once
            assert all(relative_error(found[name], gradient) < 5e-6 for name, gradient in wanted.items())
    assert any(once for (_, once), *_ in of_rank)


@pytest.mark.parametrize(
    ("kind", "num_layers", "message"),
    [
        ("full", 3, r"num_layers is 3 with recompute.kind full.* 4 / \(1 x 1\) = 4 layers; use a divisor of 4"),
        ("full", 5, "use a divisor of 4"),
        ("block", 5, r"num_layers is 5 with recompute.kind block.* 4 / \(1 x 1\) = 4 layers; use at most 4"),
    ],
)
def test_layers_that_a_stage_has_not_are_refused(kind: Any, num_layers: int, message: str) -> None:
    """Megatron fails with an index out of range, or takes fewer."""
    config = task_of("actor", True).model.config
    with pytest.raises(ValueError, match=message):
        transformer_config(config, ParallelConfig(), recompute=RecomputeConfig(kind=kind, num_layers=num_layers))


# ------------------------------------------------------------------------------------------------ overlap


def use_small_buckets() -> None:
    """Several buckets for each chunk, the embedding and the output layer in their own: as in large models."""
    optimizer.DistributedDataParallelConfig = functools.partial(
        optimizer.DistributedDataParallelConfig, bucket_size=1000
    )


def three_steps(role: str, tied: bool, parallel: ParallelConfig, settings: dict[str, Any]) -> list[Any]:
    """Gradient norms; outputs as the first use of the weights after the second step; the weights right after the
    third."""
    use_small_buckets()
    task = experts() if parallel.expert > 1 else task_of(role, tied)
    config = OptimizerConfig(lr=0.1, eps=0.1, clip_grad=0.0, **settings)
    engine = MegatronEngine(role, task.model.config, parallel, "fp32", config, seed=3, timeout=30)
    own = own_samples(CASE, engine.groups.coordinates.data, engine.groups.grid.data_parallel_size)
    batches = batches_of(task, CASE, parallel, own)

    def step() -> float:
        return engine.train_step(batches, objective_of(role), 0.1, TEMPERATURE, with_entropy=role == "actor").grad_norm

    norms = [step(), step()]
    outputs = [next(iter(result.values())) for result in engine.forward(batches, TEMPERATURE)]
    norms.append(step())
    assert (
        settings["overlap_grad_reduce"] is False
        or engine.groups.coordinates.pipeline
        or len(engine.chunks[0].bucket_groups) > 3
    ), "the buckets are few"
    return [norms, outputs, {name: tensor.numpy().copy() for name, tensor in engine.parameters().items()}]


def all_settings(role: str, tied: bool, parallel: ParallelConfig) -> list[Any]:
    return [
        three_steps(role, tied, parallel, {"overlap_grad_reduce": reduces, "overlap_param_gather": gathers})
        for reduces, gathers in ((False, False), (True, False), (True, True))
    ]


@pytest.mark.parametrize(
    ("role", "tied", "num_ranks", "parallel"),
    [
        ("actor", False, 2, ParallelConfig()),
        ("actor", True, 4, ParallelConfig(pipeline=2)),
        ("actor", False, 4, ParallelConfig(pipeline=2, virtual_pipeline=2)),
        ("actor", False, 4, ParallelConfig(tensor=2, sequence=True)),
        ("critic", False, 2, ParallelConfig(context=2)),
        ("actor", False, 2, ParallelConfig(expert=2)),
    ],
    ids=["dp2", "pp2dp2", "vpp2dp2", "tp2spdp2", "cp2", "ep2"],
)
def test_overlap_changes_no_bit(role: str, tied: bool, num_ranks: int, parallel: ParallelConfig) -> None:
    for rank, (plain, *overlapped) in enumerate(run(all_settings, num_ranks, role, tied, parallel)):
        for name, found in zip(("gradients", "gradients and parameters"), overlapped, strict=True):
            where = f"rank {rank}, {name} overlapped"
            # Each rank squares the part of the gradient that it keeps, and that depends on the buckets.
            assert found[0] == pytest.approx(plain[0], rel=1e-6), where
            assert all(np.array_equal(one, other) for one, other in zip(found[1], plain[1], strict=True)), where
            differ = [n for n, weight in plain[2].items() if not np.array_equal(weight, found[2][n])]
            assert not differ, f"{where}: {differ}"


def saved_right_after_a_step(folder: str) -> None:
    use_small_buckets()
    task = task_of("actor", False)
    made = []
    for late in (True, False):
        config = OptimizerConfig(lr=0.1, eps=0.1, overlap_param_gather=late)
        engine = MegatronEngine("actor", task.model.config, ParallelConfig(), "fp32", config, seed=3, timeout=30)
        own = own_samples(CASE, engine.groups.coordinates.data, 2)
        batches = batches_of(task, CASE, engine.parallel, own)
        engine.train_step(batches, objective_of("actor"), 0.1, TEMPERATURE, with_entropy=True)
        if late:
            engine.save(folder)
        made.append(engine)
    reader = MegatronEngine("actor", task.model.config, ParallelConfig(), "fp32", ADAM, seed=8, timeout=30)
    reader.load(folder)
    wanted = made[1].parameters()
    for engine in (made[0], reader):
        for name, parameter in engine.parameters().items():
            assert parameter.equal(wanted[name]), name


def test_a_checkpoint_holds_the_parameters_that_are_collected_late(tmp_path: Path) -> None:
    run(saved_right_after_a_step, 2, str(tmp_path))
