"""The engine against transformers: outputs and gradients are the same for every layout; checkpoints continue to the
bit."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from harness import run
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # after megarl's patches
from reference_weights import VOCAB_SIZE, expected, load, tiny_model

from megarl.config import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack
from megarl.engines import optimizer
from megarl.engines.megatron import MegatronEngine, TokenBatch, TokenOutputs
from megarl.engines.stored import is_stored
from megarl.model.gpt import local_parameters

# Four micro-batches of sequences (prompt length, response length).
LENGTHS = [[(5, 11), (4, 5), (1, 6)], [(10, 20), (9, 1)], [(3, 9)], [(2, 3), (1, 4), (4, 1), (2, 3)]]
TEMPERATURE = 0.8
GRADIENTS_ONLY = OptimizerConfig(kind="sgd", lr=0.0, weight_decay=0.0, clip_grad=0.0)

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "dp2": (2, ParallelConfig()),
    "cp2": (2, ParallelConfig(context=2)),
}


def micro_batches(parallel: ParallelConfig, kept: range = range(len(LENGTHS))) -> list[PackedBatch]:
    """The same sequences and per-token numbers for every layout; only the padding differs."""
    generator = np.random.default_rng(3)
    batches = []
    for sequences in LENGTHS:
        items = [
            TokenSequence(generator.integers(0, VOCAB_SIZE, p + r), p, generator.random(r) < 0.9) for p, r in sequences
        ]
        per_token = {
            name: [generator.normal(size=r).astype(np.float32) for _, r in sequences] for name in ("weight", "goal")
        }
        batches.append(pack(items, per_token, multiple=parallel.sequence_multiple))
    return [batches[number] for number in kept]


def actor_loss(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    weight = batch.per_token["weight"] * batch.mask
    loss = (weight * outputs.logprobs).sum() + 0.3 * (weight * outputs.entropy).sum()
    return loss, {"loss": loss, "tokens": batch.mask.sum()}


def critic_loss(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert outputs.values is not None
    loss = ((outputs.values - batch.per_token["goal"]) ** 2 * batch.mask).sum()
    return loss, {"loss": loss, "tokens": batch.mask.sum()}


def reference_outputs(
    model: Any, head: torch.Tensor, batch: PackedBatch, temperature: float = TEMPERATURE
) -> TokenOutputs:
    """transformers, one sequence at a time; what stands at padding is not compared."""
    logprobs, entropy, values = (torch.zeros(batch.num_tokens) for _ in range(3))
    for start, length in zip(batch.cu_seqlens[:-1], batch.lengths, strict=True):
        where = slice(int(start), int(start) + int(length))
        hidden = model.model(input_ids=torch.tensor(batch.tokens[where])[None]).last_hidden_state[0]
        log_softmax = torch.log_softmax(model.lm_head(hidden) / temperature, dim=-1)
        logprobs[where] = log_softmax.gather(1, torch.tensor(batch.targets[where])[:, None])[:, 0]
        entropy[where] = -(log_softmax.exp() * log_softmax).sum(-1)
        values[where] = F.linear(hidden, head)[:, 0]
    return TokenOutputs(logprobs, entropy, values)


def value_head() -> torch.Tensor:
    return 0.2 * torch.randn(1, 32, generator=torch.Generator().manual_seed(5))


def weights_of(model: Any, head: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), "value_head.weight": head}


def build(
    kind: str, tied: bool, role: Any, parallel: ParallelConfig, precision: Any = "fp32", **options: Any
) -> tuple[MegatronEngine, Any, torch.Tensor]:
    model = tiny_model(kind, tied)
    head = value_head().requires_grad_()
    engine = MegatronEngine(role, model.config, parallel, precision, timeout=30, **options)
    load(engine, weights_of(model, head.detach()))
    return engine, model, head


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def check_outputs(engine: MegatronEngine, model: Any, head: torch.Tensor, names: list[str]) -> None:
    batches = micro_batches(engine.parallel)
    results = engine.forward(batches, TEMPERATURE, with_entropy=True)
    for batch, result in zip(batches, results, strict=True):
        with torch.no_grad():
            wanted = reference_outputs(model, head, batch)
        assert sorted(result) == sorted(names)
        real = np.concatenate([np.arange(s, s + n) for s, n in zip(batch.cu_seqlens[:-1], batch.lengths, strict=True)])
        for name in names:
            error = np.abs(result[name][real] - getattr(wanted, name).numpy()[real]).max()
            assert error < 1e-5, f"{name}: {error}"


def check_gradients(engine: MegatronEngine, model: Any, head: torch.Tensor, loss: Any) -> None:
    grid, here = engine.groups.grid, engine.groups.coordinates
    own = range(here.data, len(LENGTHS), grid.data_parallel_size)
    result = engine.train_step(micro_batches(engine.parallel, own), loss, 0.0, TEMPERATURE, with_entropy=True)
    total, tokens = torch.zeros(()), 0
    for batch in micro_batches(engine.parallel):
        outputs = reference_outputs(model, head, batch)
        numbers = {name: torch.tensor(array) for name, array in batch.per_token.items()}
        value, _ = loss(outputs, TokenBatch(torch.tensor(batch.mask), numbers))
        total = total + value
        tokens += int(batch.mask.sum())
    total.backward()
    assert result.applied
    assert result.sums["tokens"] == tokens
    assert result.sums["loss"] == pytest.approx(float(total), rel=1e-5)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if head.grad is not None:
        wanted["value_head.weight"] = head.grad
    squares = sum(float((gradient.double() ** 2).sum()) for gradient in wanted.values())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-5)
    for name, parameter in local_parameters(engine.chunks).items():
        error = relative_error(parameter.main_grad, expected(engine, name, parameter.shape, wanted))
        assert error < 1e-5, f"{name}: {error}"


def actor_agrees(
    kind: str, tied: bool, parallel: ParallelConfig, recompute: Any = "none", fused_output: bool = True
) -> None:
    options: dict[str, Any] = {"recompute": RecomputeConfig(kind=recompute), "fused_output": fused_output}
    engine, model, head = build(kind, tied, "actor", parallel, optimizer=GRADIENTS_ONLY, chunk_size=16, **options)
    check_outputs(engine, model, head, ["logprobs", "entropy"])
    check_gradients(engine, model, head, actor_loss)


def critic_agrees(kind: str, tied: bool, parallel: ParallelConfig) -> None:
    engine, model, head = build(kind, tied, "critic", parallel, optimizer=GRADIENTS_ONLY)
    check_outputs(engine, model, head, ["values"])
    check_gradients(engine, model, head, critic_loss)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_actor_has_the_outputs_and_gradients_of_transformers(layout: str, tied: bool) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(actor_agrees, num_ranks, "qwen2", tied, parallel)


def test_actor_agrees_in_a_mixed_layout() -> None:
    run(actor_agrees, 4, "qwen2", True, ParallelConfig(tensor=2, pipeline=2, sequence=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_critic_has_the_values_and_gradients_of_transformers(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(critic_agrees, num_ranks, "llama", True, parallel)


@pytest.mark.parametrize("layout", ["tp2", "tp2sp"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_other_families_agree_under_tensor_parallel(kind: str, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(actor_agrees, num_ranks, kind, False, parallel)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing(recompute: str) -> None:
    run(actor_agrees, 2, "qwen2", False, ParallelConfig(context=2), recompute)


@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2"])
def test_without_the_fused_output_layer_all_is_the_same(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(actor_agrees, num_ranks, "qwen2", True, parallel, "none", False)


# ------------------------------------------------------------------------------------------------ the optimizer

# With this eps an update is a smooth function of the gradient, so that rounding does not decide its sign.
ADAM = OptimizerConfig(kind="adam", lr=0.1, eps=1.0, weight_decay=0.1, clip_grad=0.5, beta1=0.8, beta2=0.9)


def train(engine: MegatronEngine, loss: Any, num_steps: int) -> list[float]:
    own = range(engine.groups.coordinates.data, len(LENGTHS), engine.groups.grid.data_parallel_size)
    batches = micro_batches(engine.parallel, own)
    results = [engine.train_step(batches, loss, ADAM.lr, TEMPERATURE, with_entropy=True) for _ in range(num_steps)]
    assert all(result.applied for result in results)
    return [result.grad_norm for result in results]


def adam_agrees(tied: bool, parallel: ParallelConfig, kind: str = "qwen2") -> None:
    """Two steps against torch.optim.AdamW on the transformers model."""
    engine, model, head = build(kind, tied, "actor", parallel, optimizer=ADAM)
    train(engine, actor_loss, 2)
    named = dict(model.named_parameters())
    decayed = [parameter for parameter in named.values() if parameter.dim() > 1]
    others = [parameter for parameter in named.values() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": ADAM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    for _ in range(2):
        adam.zero_grad()
        for batch in micro_batches(parallel):
            numbers = {name: torch.tensor(array) for name, array in batch.per_token.items()}
            loss, _ = actor_loss(reference_outputs(model, head, batch), TokenBatch(torch.tensor(batch.mask), numbers))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), ADAM.clip_grad)
        adam.step()
    weights = weights_of(model, head.detach())
    for name, parameter in engine.parameters().items():
        error = relative_error(parameter, expected(engine, name, parameter.shape, weights))
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("layout", ["one", "tp2sp", "pp2", "dp2", "cp2"])
def test_adam_makes_the_same_step_in_every_layout(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(adam_agrees, num_ranks, True, parallel)


def test_adam_makes_the_same_step_with_data_and_pipeline_parallel() -> None:
    run(adam_agrees, 4, True, ParallelConfig(pipeline=2))


def bf16_keeps_loaded_weights(parallel: ParallelConfig) -> None:
    """An update of nothing leaves what was loaded: the float32 main parameters are those of the new weights."""
    engine, model, head = build("qwen2", False, "actor", parallel, precision="bf16", optimizer=ADAM)
    own = range(engine.groups.coordinates.data, len(LENGTHS), engine.groups.grid.data_parallel_size)
    batches = micro_batches(parallel, own)
    assert engine.train_step(batches, actor_loss, 0.0, TEMPERATURE, with_entropy=True).applied
    for name, parameter in engine.parameters().items():
        wanted = expected(engine, name, parameter.shape, weights_of(model, head.detach()))
        assert torch.equal(parameter, wanted.bfloat16()), name
    for batch, result in zip(batches, engine.forward(batches, TEMPERATURE), strict=True):
        with torch.no_grad():
            logprobs = reference_outputs(model, head, batch).logprobs
        assert logprobs is not None
        assert np.abs((result["logprobs"] - logprobs.numpy())[batch.mask]).max() < 0.5


@pytest.mark.parametrize("layout", ["dp2", "tp2sp"])
def test_bf16_trains_from_the_weights_that_were_loaded(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(bf16_keeps_loaded_weights, num_ranks, parallel)


def skips_non_finite(parallel: ParallelConfig) -> None:
    engine, _, _ = build("llama", False, "actor", parallel, optimizer=ADAM)
    before = {name: tensor.clone() for name, tensor in engine.parameters().items()}

    def spoiled(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = actor_loss(outputs, batch)
        return (loss * float("inf") if engine.groups.rank == 1 else loss), sums

    own = range(engine.groups.coordinates.data, len(LENGTHS), engine.groups.grid.data_parallel_size)
    result = engine.train_step(micro_batches(parallel, own), spoiled, 0.1, TEMPERATURE, with_entropy=True)
    assert not result.applied
    assert not np.isfinite(result.grad_norm)
    for name, tensor in engine.parameters().items():
        assert torch.equal(tensor, before[name]), name
    train(engine, actor_loss, 1)  # and the next step is a good one


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_non_finite_gradient_on_one_rank_skips_the_update_on_all(layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(skips_non_finite, num_ranks, parallel)


def dummy_batch_is_harmless() -> None:
    """Rank 1 has nothing to train on: the step is that of rank 0's data."""
    engine, _, _ = build("llama", False, "actor", ParallelConfig(), optimizer=GRADIENTS_ONLY)
    first = micro_batches(engine.parallel, range(1))
    dummy = [pack([], {"weight": [], "goal": []})]
    own = first if engine.groups.rank == 0 else dummy
    result = engine.train_step(own, actor_loss, 0.0, TEMPERATURE, with_entropy=True)
    assert result.sums["tokens"] == first[0].mask.sum()
    assert len(engine.forward(dummy)[0]["logprobs"]) == 1


def test_a_rank_may_have_a_dummy_micro_batch() -> None:
    run(dummy_batch_is_harmless, 2)


# ------------------------------------------------------------------------------------------------ roles together


def roles_alternate() -> None:
    """Three roles with three layouts in two processes: none disturbs another."""
    split = ParallelConfig(tensor=2, sequence=True)
    actor, model, head = build("qwen2", False, "actor", split, optimizer=GRADIENTS_ONLY)
    critic, _, _ = build("qwen2", False, "critic", ParallelConfig(), optimizer=GRADIENTS_ONLY)
    reference, _, _ = build("qwen2", False, "reference", ParallelConfig(pipeline=2))
    assert actor.groups.tensor is reference.groups.pipeline, "one communicator serves equal sets of ranks"
    for _ in range(2):
        check_outputs(actor, model, head, ["logprobs", "entropy"])
        check_outputs(critic, model, head, ["values"])
        check_outputs(reference, model, head, ["logprobs", "entropy"])
        for engine, loss in ((actor, actor_loss), (critic, critic_loss)):
            model.zero_grad()
            head.grad = None
            check_gradients(engine, model, head, loss)


def test_roles_with_different_layouts_alternate_in_the_same_processes() -> None:
    run(roles_alternate, 2)


def released_and_resumed(parallel: ParallelConfig) -> None:
    engine, model, head = build("qwen2", False, "actor", parallel, optimizer=ADAM)
    twin, _, _ = build("qwen2", False, "actor", parallel, optimizer=ADAM)
    engine.residency.enabled = True  # on the CPU it is off, but storages can be emptied there too
    train(engine, actor_loss, 1)
    train(twin, actor_loss, 1)
    engine.release(["gradients", "optimizer"])
    with pytest.raises(RuntimeError, match="off the device"), released(engine, "parameters"):
        engine.parameters()
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in engine.chunks[0].buffers)
    engine.resume()
    train(engine, actor_loss, 1)
    train(twin, actor_loss, 1)
    for name, tensor in twin.parameters().items():
        assert torch.equal(engine.parameters()[name], tensor), name


@contextlib.contextmanager
def released(engine: MegatronEngine, kind: Any) -> Iterator[None]:
    engine.release([kind])
    try:
        yield
    finally:
        engine.resume([kind])


def test_what_was_released_comes_back_to_the_bit() -> None:
    run(released_and_resumed, 2, ParallelConfig())


# ------------------------------------------------------------------------------------------------ checkpoints


def bits(engine: MegatronEngine) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in engine.parameters().items()}


def use_small_buckets() -> None:
    """Gradient buffers of many buckets, with padding between them, as large models have."""
    optimizer.DistributedDataParallelConfig = functools.partial(
        optimizer.DistributedDataParallelConfig, bucket_size=1000
    )


def train_and_save(folder: str, parallel: ParallelConfig, steps: int = 2) -> tuple[list[float], dict[str, bytes]]:
    use_small_buckets()
    engine, _, _ = build("qwen2", True, "actor", parallel, optimizer=ADAM)
    train(engine, actor_loss, steps)
    engine.save(folder)
    return train(engine, actor_loss, 2), bits(engine)


def load_and_train(folder: str, parallel: ParallelConfig) -> tuple[list[float], dict[str, bytes]]:
    use_small_buckets()
    model = tiny_model("qwen2", tied=True)
    engine = MegatronEngine("actor", model.config, parallel, precision="fp32", optimizer=ADAM, seed=7, timeout=30)
    engine.load(folder)
    return train(engine, actor_loss, 2), bits(engine)


@pytest.mark.parametrize("layout", ["dp2", "tp2sp", "vpp2"])
def test_training_continues_to_the_bit_after_a_checkpoint(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    went_on = run(train_and_save, num_ranks, str(tmp_path), parallel)
    resumed = run(load_and_train, num_ranks, str(tmp_path), parallel)
    for rank, (wanted, found) in enumerate(zip(went_on, resumed, strict=True)):
        assert found[0] == wanted[0], f"gradient norms of rank {rank}"
        assert found[1] == wanted[1], f"weights of rank {rank}"


def train_while_saving(folder: str, parallel: ParallelConfig) -> tuple[list[float], dict[str, bytes]]:
    """No file is written before two more steps are done."""
    use_small_buckets()
    engine, _, _ = build("qwen2", True, "actor", parallel, optimizer=ADAM)
    train(engine, actor_loss, 2)
    write, has_trained = FileSystemWriterAsync.write_preloaded_data, threading.Event()

    def late(*arguments: Any, **options: Any) -> None:
        assert has_trained.wait(30)
        write(*arguments, **options)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(late)
    before = psutil.Process().children(recursive=True)
    save = engine.start_save(folder)
    assert psutil.Process().children(recursive=True) == before, "no process writes"
    found = train(engine, actor_loss, 2), bits(engine)
    assert not save.is_written
    assert not is_stored(folder)
    has_trained.set()
    save.finish()
    assert save.is_written
    return found


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_what_is_saved_while_training_goes_on_is_the_state_at_the_start(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    went_on = run(train_while_saving, num_ranks, str(tmp_path), parallel)
    assert run(load_and_train, num_ranks, str(tmp_path), parallel) == went_on


def save_on_a_full_disk(folder: str) -> None:
    """Rank 1's; the other rank hears of it, and there is no checkpoint."""
    engine, _, _ = build("qwen2", True, "actor", ParallelConfig(), optimizer=ADAM)
    train(engine, actor_loss, 1)

    def full(transforms: Any, number: int, bucket: Any, results: Any, counted: Any, *_: Any) -> None:
        results.put((number, OSError(errno.ENOSPC, "No space left on device")))

    if torch.distributed.get_rank() == 1:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(full)
    save = engine.start_save(folder)
    own = r"No space left on device; its share is 0\.\d\d GB, and \d+\.\d\d GB are free there"
    words = own if torch.distributed.get_rank() == 1 else "rank 1 could not write its files"
    with pytest.raises(RuntimeError, match=words):
        save.finish()
    assert not is_stored(folder)


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    run(save_on_a_full_disk, 2, str(tmp_path))


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_a_checkpoint_may_come_before_the_first_step(layout: str, tmp_path: Path) -> None:
    """The critic trains alone at first (run.critic_warmup), and the actor is saved with it."""
    num_ranks, parallel = (1, ParallelConfig()) if layout == "one" else LAYOUTS[layout]
    went_on = run(train_and_save, num_ranks, str(tmp_path), parallel, 0)
    assert run(load_and_train, num_ranks, str(tmp_path), parallel) == went_on


def test_a_checkpoint_loads_into_another_layout(tmp_path: Path) -> None:
    went_on = run(train_and_save, 2, str(tmp_path), LAYOUTS["tp2sp"][1])
    resumed = run(load_and_train, 2, str(tmp_path), LAYOUTS["dp2"][1])
    assert resumed[0][0] == pytest.approx(went_on[0][0], rel=1e-4)


def missing_checkpoint() -> None:
    engine, _, _ = build("llama", False, "actor", ParallelConfig())
    with pytest.raises(FileNotFoundError, match="no checkpoint of the actor"):
        engine.load("/nonexistent")


def test_a_missing_checkpoint_is_named() -> None:
    run(missing_checkpoint, 1)
