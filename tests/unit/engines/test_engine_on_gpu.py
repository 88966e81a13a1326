"""Options that need a GPU and Transformer Engine. Run this file by itself: tests/distributed hides the GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 512
LR = 1e-3


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("world") / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@functools.cache
def batches() -> tuple[PackedBatch, ...]:
    generator = np.random.default_rng(0)

    def micro_batch(lengths: list[int]) -> PackedBatch:
        items = [TokenSequence(generator.integers(0, VOCAB_SIZE, n), 8, np.ones(n - 8, bool)) for n in lengths]
        return pack(items)

    return micro_batch([4000, 3000, 1000]), micro_batch([2000, 5000])


def loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = -(outputs.logprobs * batch.mask).sum() / 10_000
    return value, {"loss": value}


def build(optimizer: OptimizerConfig | None = None, **options: Any) -> Any:
    import transformers

    from megarl.engines.megatron import MegatronEngine

    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return MegatronEngine(
        "actor", config, ParallelConfig(), "bf16", optimizer or OptimizerConfig(clip_grad=0.0), **options
    )


def step(engine: Any, lr: float = LR) -> tuple[float, int]:
    """(loss, peak bytes) of one step."""
    torch.cuda.reset_peak_memory_stats()
    result = engine.train_step(list(batches()), loss, lr)
    assert result.applied
    return result.sums["loss"], torch.cuda.max_memory_allocated()


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    from megarl.model.gpt import local_parameters

    return {name: parameter.main_grad.clone() for name, parameter in local_parameters(engine.chunks).items()}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": RecomputeConfig(kind="full")},
        {"recompute": RecomputeConfig(kind="block", num_layers=2)},
        {"recompute": RecomputeConfig(kind="selective", modules=["core_attn", "mlp"])},
        {"offload_activations": ["qkv_linear", "core_attn", "attn_proj"]},
        {"offload_activations": ["core_attn"], "recompute": RecomputeConfig(kind="selective", modules=["mlp"])},
    ],
    ids=["full", "block", "selective", "offload", "offload and selective"],
)
def test_memory_is_saved_and_the_gradient_is_the_same(options: dict[str, Any]) -> None:
    plain, saving = build(), build(**options)
    # Other passes come between, and their micro-batches are others. The optimizer makes its states in the first.
    for engine in (plain, saving):
        engine.forward(list(batches())[:1])
        engine.train_step(list(batches())[:1], loss, 0.0)
    wanted_loss, wanted_peak = step(plain, lr=0.0)
    found_loss, found_peak = step(saving, lr=0.0)
    assert found_loss == pytest.approx(wanted_loss, rel=1e-3)
    assert found_peak < wanted_peak
    for name, gradient in gradients(plain).items():
        assert relative_error(gradients(saving)[name], gradient) < 1e-2, name


def test_norms_of_fused_layers_cannot_be_recomputed() -> None:
    with pytest.raises(ValueError, match="recompute.modules has layernorm"):
        build(recompute=RecomputeConfig(kind="selective", modules=["layernorm"]))


def narrow() -> Any:
    return build(OptimizerConfig(state_precision="bf16", clip_grad=0.1))


def states(engine: Any) -> list[dict[str, torch.Tensor]]:
    (inner,) = engine.optimizer.chained_optimizers
    return list(inner.optimizer.state.values())


def test_bf16_states_train_as_float32_ones_nearly_do() -> None:
    wide, thin = build(OptimizerConfig(clip_grad=0.1)), narrow()
    start = {name: tensor.clone() for name, tensor in wide.parameters().items()}
    for _ in range(4):
        assert step(thin)[0] == pytest.approx(step(wide)[0], rel=1e-2)
    for state in states(thin):
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["master_param"].dtype == torch.float32
    for name, tensor in wide.parameters().items():
        if tensor.dim() > 1:  # norms, near 1 in bf16, move by a step of the grid or not at all
            moved = tensor.float() - start[name].float()
            assert relative_error(thin.parameters()[name].float() - start[name].float(), moved) < 0.1, name


def test_weights_that_are_loaded_later_replace_the_main_parameters_of_bf16_states() -> None:
    engine = narrow()
    start = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    step(engine)
    for name, tensor in engine.parameters().items():
        tensor.copy_(start[name])
    engine.mark_weights_loaded()
    step(engine, lr=0.0)
    assert all(tensor.equal(start[name]) for name, tensor in engine.parameters().items())


def test_bf16_states_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    engine = narrow()
    step(engine)
    engine.save(str(tmp_path))
    again = build(OptimizerConfig(state_precision="bf16", clip_grad=0.1), seed=9)
    again.load(str(tmp_path))
    assert all(tensor.equal(engine.parameters()[name]) for name, tensor in again.parameters().items())
    for found, wanted in zip(states(again), states(engine), strict=True):
        assert found.keys() == wanted.keys()
        assert all(value.equal(wanted[name]) for name, value in found.items() if isinstance(value, torch.Tensor))
    assert step(again)[0] == step(engine)[0]
