"""The optimizers' arithmetic in every layout: what weight decay leaves out, and SGD. (Adam's step is in
test_gradient_grid.py, clipping in test_engine.py.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from training_task import ADAM, SHAPES, Case, joined, relative_error, task_of, train_all

from megarl.config import OptimizerConfig, ParallelConfig
from megarl.engines.megatron import MegatronEngine

CASE = Case("packed in 4", "token-mean", len(SHAPES))
ROLES = ("actor", "critic")
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "tp2sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
}


def decays(name: str) -> bool:
    """Names as on disk: matrices do, norms and biases do not."""
    return not (name.endswith((".bias", "norm.weight")))


def trained(layout: str, config: OptimizerConfig) -> dict[str, Any]:
    """For each role what one step made, as one outcome."""
    num_ranks, parallel = LAYOUTS[layout]
    tasks = [task_of(role, False) for role in ROLES]
    of_rank = run(train_all, num_ranks, [(task, parallel, [CASE], {"optimizer": config}) for task in tasks])
    return {task.role: joined(task, parallel, [outcomes[n][0] for outcomes in of_rank]) for n, task in enumerate(tasks)}


def before(role: str, name: str) -> np.ndarray:
    task = task_of(role, False)
    return task.weights["value_head.weight" if name == "score.weight" else name].numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_decay_leaves_out_norms_and_biases(layout: str) -> None:
    """Two steps that differ in the decay alone: decoupled, it takes lr x decay x weight."""
    with_decay = trained(layout, replace(ADAM, weight_decay=0.5))
    without = trained(layout, replace(ADAM, weight_decay=0.0))
    for role in ROLES:
        names = with_decay[role].weights.keys()
        assert {decays(name) for name in names} == {True, False}
        for name in names:
            taken = without[role].weights[name] - with_decay[role].weights[name]
            if decays(name):
                assert relative_error(taken, ADAM.lr * 0.5 * before(role, name)) < 1e-4, f"{role}: {name}"
            else:
                assert not taken.any(), f"{role}: {name}"


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sgd_steps_as_torch_does(layout: str, clip_grad: float) -> None:
    config = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.2, clip_grad=clip_grad)
    gradients = {role: outcome.gradients for role, outcome in trained("one", replace(config, clip_grad=0.0)).items()}
    for role, outcome in trained(layout, config).items():
        weights = {name: torch.tensor(before(role, name)).requires_grad_() for name in gradients[role]}
        for name, weight in weights.items():
            weight.grad = torch.tensor(gradients[role][name])
        if clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip_grad)
            assert norm > clip_grad
            assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
        groups = [
            {"params": [w for name, w in weights.items() if decays(name) == decay], "weight_decay": 0.2 * decay}
            for decay in (True, False)
        ]
        torch.optim.SGD(groups, lr=config.lr).step()
        for name, weight in weights.items():
            assert relative_error(outcome.weights[name], weight.detach().numpy()) < 1e-6, f"{role}: {name}"


def narrow_states() -> None:
    config = replace(ADAM, state_precision="bf16")
    with pytest.raises(ValueError, match="state_precision bf16 needs a GPU .cpu here., Transformer Engine .not found."):
        MegatronEngine("actor", task_of("actor", False).model.config, ParallelConfig(), "bf16", config, timeout=30)


def test_bf16_states_are_refused_without_transformer_engine() -> None:
    run(narrow_states, 1)
