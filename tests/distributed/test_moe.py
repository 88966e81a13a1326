"""Mixtures of experts against transformers: outputs, gradients and updates for every way to spread the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from reference_weights import load, tiny_model
from test_engine import (
    ADAM,
    GRADIENTS_ONLY,
    TEMPERATURE,
    actor_agrees,
    actor_loss,
    adam_agrees,
    bits,
    build,
    check_gradients,
    check_outputs,
    critic_agrees,
    micro_batches,
    train,
    value_head,
    weights_of,
)

from megarl.config import ParallelConfig
from megarl.data.packing import pack
from megarl.engines.megatron import MegatronEngine

SPLIT = {"tensor": 2, "sequence": True}
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "ep2": (2, ParallelConfig(expert=2)),
    "dp2": (2, ParallelConfig()),
    "etp2": (2, ParallelConfig(expert_tensor=2)),
    "tp2": (2, ParallelConfig(**SPLIT)),
    "tp2ep2": (2, ParallelConfig(**SPLIT, expert=2)),
    "tp2etp2": (2, ParallelConfig(**SPLIT, expert_tensor=2)),
    "cp2ep2": (2, ParallelConfig(context=2, expert=2)),
    "vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "tp2ep2 of 4": (4, ParallelConfig(**SPLIT, expert=2)),
    "tp2ep2etp2 of 4": (4, ParallelConfig(**SPLIT, expert=2, expert_tensor=2)),
    "pp2ep2 of 4": (4, ParallelConfig(pipeline=2, expert=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_actor_has_the_outputs_and_gradients_of_transformers(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(actor_agrees, num_ranks, "qwen3_moe", False, parallel)


def test_critic_has_the_values_and_gradients_of_transformers() -> None:
    run(critic_agrees, 2, "qwen3_moe", True, ParallelConfig(**SPLIT, expert=2))


def test_recompute_changes_nothing() -> None:
    run(actor_agrees, 2, "qwen3_moe", True, ParallelConfig(expert=2), "full")


def weights_need_not_add_up_to_one() -> None:
    model = tiny_model("qwen3_moe", norm_topk_prob=False)
    head = value_head().requires_grad_()
    engine = MegatronEngine("actor", model.config, ParallelConfig(expert=2), "fp32", optimizer=GRADIENTS_ONLY)
    load(engine, weights_of(model, head.detach()))
    check_outputs(engine, model, head, ["logprobs", "entropy"])
    check_gradients(engine, model, head, actor_loss)


def test_the_chosen_experts_weights_need_not_add_up_to_one() -> None:
    run(weights_need_not_add_up_to_one, 2)


@pytest.mark.parametrize("layout", ["ep2", "tp2", "tp2ep2 of 4"])
def test_adam_makes_the_same_step_in_every_layout(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(adam_agrees, num_ranks, False, parallel, "qwen3_moe")


def unequal_numbers_of_micro_batches() -> None:
    """Rank 0 scores four micro-batches, rank 1 one: the experts of both serve all five."""
    engine, _, _ = build("qwen3_moe", False, "reference", ParallelConfig(expert=2))
    batches = micro_batches(engine.parallel)
    everywhere = engine.forward(batches, TEMPERATURE)
    own = range(4) if engine.groups.rank == 0 else range(2, 3)
    found = engine.forward([batches[number] for number in own], TEMPERATURE)
    assert len(found) == len(own)
    for number, result in zip(own, found, strict=True):
        np.testing.assert_allclose(result["logprobs"], everywhere[number]["logprobs"], atol=1e-5)


def test_ranks_that_share_experts_may_score_unequal_numbers_of_micro_batches() -> None:
    run(unequal_numbers_of_micro_batches, 2)


def dummy_batch_is_harmless() -> None:
    """Rank 1 has nothing to train on: the step is that of rank 0's data, through the experts of both."""
    engine, model, _ = build("qwen3_moe", False, "actor", ParallelConfig(expert=2), optimizer=GRADIENTS_ONLY)
    first = micro_batches(engine.parallel, range(1))
    own = first if engine.groups.rank == 0 else [pack([], {"weight": [], "goal": []})]
    result = engine.train_step(own, actor_loss, 0.0, TEMPERATURE, with_entropy=True)
    alone = MegatronEngine("actor", model.config, ParallelConfig(), "fp32", optimizer=GRADIENTS_ONLY)
    load(alone, model.state_dict())
    batches = first if engine.groups.rank == 0 else [pack([], {"weight": [], "goal": []})]
    wanted = alone.train_step(batches, actor_loss, 0.0, TEMPERATURE, with_entropy=True)
    assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert result.sums["loss"] == pytest.approx(wanted.sums["loss"], rel=1e-5)


def test_a_rank_that_shares_experts_may_have_a_dummy_micro_batch() -> None:
    run(dummy_batch_is_harmless, 2)


def train_and_save(folder: str, parallel: ParallelConfig) -> tuple[list[float], dict[str, bytes]]:
    engine, _, _ = build("qwen3_moe", False, "actor", parallel, optimizer=ADAM)
    train(engine, actor_loss, 2)
    engine.save(folder)
    return train(engine, actor_loss, 2), bits(engine)


def load_and_train(folder: str, parallel: ParallelConfig) -> tuple[list[float], dict[str, bytes]]:
    config: Any = tiny_model("qwen3_moe").config
    engine = MegatronEngine("actor", config, parallel, precision="fp32", optimizer=ADAM, seed=7, timeout=30)
    engine.load(folder)
    return train(engine, actor_loss, 2), bits(engine)


def test_training_continues_to_the_bit_after_a_checkpoint(tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS["tp2ep2"]
    went_on = run(train_and_save, num_ranks, str(tmp_path), parallel)
    resumed = run(load_and_train, num_ranks, str(tmp_path), parallel)
    assert resumed == went_on


@pytest.mark.parametrize(("saved", "loaded"), [("ep2", "dp2"), ("dp2", "tp2ep2")])
def test_a_checkpoint_loads_where_the_experts_are_spread_otherwise(saved: str, loaded: str, tmp_path: Path) -> None:
    went_on = run(train_and_save, 2, str(tmp_path), LAYOUTS[saved][1])
    resumed = run(load_and_train, 2, str(tmp_path), LAYOUTS[loaded][1])
    assert resumed[0][0] == pytest.approx(went_on[0][0], rel=1e-4)


def other_sizes() -> None:
    with pytest.raises(ValueError, match="set sequence to true"):
        build("qwen3_moe", False, "actor", ParallelConfig(tensor=2))


def test_tensor_parallel_experts_need_sequence_parallel() -> None:
    run(other_sizes, 2)


def bf16_trains() -> None:
    engine, model, head = build("qwen3_moe", False, "actor", ParallelConfig(expert=2), precision="bf16", optimizer=ADAM)
    train(engine, actor_loss, 1)
    assert all(torch.isfinite(parameter).all() for parameter in engine.parameters().values())


def test_bf16_trains() -> None:
    run(bf16_trains, 2)
