"""A small training task for actor and critic under any layout, and the comparison of what two layouts made of it.

`train` runs on one rank, `joined` and `compare` on the outcomes of all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference_weights import VOCAB_SIZE, load, tiny_model

from megarl.algorithms.aggregation import sequence_weights
from megarl.config import ActorConfig, CriticConfig, OptimizerConfig, ParallelConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack, unpack
from megarl.engines.megatron import LossFunction, MegatronEngine, TokenBatch, TokenOutputs
from megarl.engines.objectives import policy_objective, value_objective
from megarl.model.families import declare, declare_critic
from megarl.model.gpt import local_parameters
from megarl.parallel.topology import RankGrid, padded_vocab_size
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import megatron_layout

TOLERANCE = 1e-5
TEMPERATURE = 0.8
ACTOR = ActorConfig(entropy_coef=0.05, kl_loss_coef=0.1, kl_loss_kind="k3", dual_clip=1.5)
GSPO = replace(ACTOR, policy_loss="gspo", clip_low=0.01, clip_high=0.02)
CRITIC = CriticConfig(value_clip=0.2)
CONSTANT = 37.0
# With this eps an update is a smooth function of the gradient, so that rounding does not decide its sign. The largest
# weights change by a tenth of themselves, so that a hundred thousandth of them is a ten thousandth of the step. Without
# clipping the buffers still hold the whole gradient after the step.
ADAM = OptimizerConfig(lr=0.1, eps=0.1, weight_decay=0.1, clip_grad=0.0, beta1=0.8, beta2=0.9)

# (prompt length, response length, has loss tokens)
SHAPES = [
    (5, 11, True),
    (3, 7, False),
    (10, 20, True),
    (1, 6, True),
    (9, 1, True),
    (2, 4, False),
    (4, 9, True),
    (2, 3, True),
]
LONGEST = 32
SILENT = [number for number, (_, _, counts) in enumerate(SHAPES) if not counts]


@dataclass(frozen=True)
class Case:
    batching: str
    aggregation: str
    num_samples: int  # the first so many of SHAPES, over all ranks
    policy_loss: Literal["ppo", "gspo"] = "ppo"


@dataclass(frozen=True)
class Outcome:
    """What one rank, or the reference, says of a case. Gradients and weights are the rank's own parameters, or whole
    tensors under their names on disk."""

    outputs: Mapping[int, Mapping[str, np.ndarray]]  # of each sample, at the loss tokens
    sums: Mapping[str, float]
    grad_norm: float
    gradients: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    """Of each sum, what it would be if no token's part cancelled another's: rounding is a share of that."""


# ------------------------------------------------------------------------------------------------ the task


@dataclass(frozen=True)
class Task:
    """A model and the samples that it is trained on. Old and reference numbers are near the model's own, so that some
    tokens are clipped and others not."""

    role: Any
    model: Any
    head: torch.Tensor
    samples: Sequence[TokenSequence]
    given: Mapping[str, Sequence[np.ndarray]]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {**self.model.state_dict(), "value_head.weight": self.head.detach()}

    @property
    def declaration(self) -> Any:
        return declare_critic(self.model.config) if self.role == "critic" else declare(self.model.config)


def make_task(role: str, tied: bool, num_layers: int = 4) -> Task:
    """The actor is a qwen2, with biases, the critic a llama."""
    model = tiny_model("llama" if role == "critic" else "qwen2", tied, num_layers)
    head = 0.2 * torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    generator = np.random.default_rng(7)
    samples = []
    for prompt, response, counts in SHAPES:
        mask = np.logical_and(generator.random(response) < 0.7, counts)
        mask[-1] = counts
        samples.append(TokenSequence(generator.integers(0, VOCAB_SIZE, prompt + response), prompt, mask))
    with torch.no_grad():
        own = [outputs_of(model, head, sample) for sample in samples]

    def near(values: Any, scale: float) -> np.ndarray:
        return (values.numpy() + generator.normal(scale=scale, size=len(values))).astype(np.float32)

    if role == "critic":
        names = {"old_values": ("values", 0.3), "returns": ("values", 1.0)}
    else:
        names = {"old_logprobs": ("logprobs", 0.3), "reference_logprobs": ("logprobs", 0.5)}
    given = {name: [near(o[source], scale) for o in own] for name, (source, scale) in names.items()}
    if role == "actor":
        given["advantages"] = [generator.normal(size=r).astype(np.float32) for _, r, _ in SHAPES]
    return Task(role, model, head.requires_grad_(), samples, given)


@functools.cache
def task_of(role: str, tied: bool, num_layers: int = 4) -> Task:
    return make_task(role, tied, num_layers)


def outputs_of(model: Any, head: torch.Tensor, sample: TokenSequence) -> dict[str, torch.Tensor]:
    """By transformers, of the response's tokens: each [R]."""
    tokens = torch.tensor(np.asarray(sample.tokens))
    hidden = model.model(input_ids=tokens[None]).last_hidden_state[0, sample.prompt_length - 1 : -1]
    distribution = torch.distributions.Categorical(logits=model.lm_head(hidden) / TEMPERATURE)
    return {
        "logprobs": distribution.log_prob(tokens[sample.prompt_length :]),
        "entropy": distribution.entropy(),
        "values": F.linear(hidden, head)[:, 0],
    }


def objective_of(role: str, policy_loss: str = "ppo", context: dist.ProcessGroup | None = None) -> LossFunction:
    """The real one; the whole loss is added to the sums."""
    actor = ACTOR if policy_loss == "ppo" else GSPO
    inner = policy_objective(actor, context) if role == "actor" else value_objective(CRITIC)

    def objective(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = inner(outputs, batch)
        return loss, {**sums, "loss": loss.detach()}

    return objective


# ------------------------------------------------------------------------------------------------ one rank's part


def own_samples(case: Case, data: int, num_data: int) -> list[int]:
    """With one packed micro-batch and two data-parallel ranks, or one sequence each, the second has no loss tokens."""
    everything = list(range(case.num_samples))
    if num_data == 1:
        return everything
    if case.batching == "packed in 1":
        return [[n for n in everything if n not in SILENT], SILENT][data]
    return everything[data::num_data]


def batches_of(task: Task, case: Case, parallel: ParallelConfig, own: Sequence[int]) -> list[PackedBatch]:
    count = int(case.batching[-1])
    multiple = parallel.sequence_multiple
    if case.batching.startswith("padded"):
        multiple = LONGEST  # which every layout's own multiple divides
    parts = [list(part) for part in np.array_split(np.array(own, dtype=int), count)]
    if parallel.virtual_pipeline > 1:
        parts += [[]] * (-count % parallel.pipeline)
    counts = [int(np.sum(task.samples[n].loss_mask)) for n in range(case.num_samples)]
    totals = sum(counts), sum(count > 0 for count in counts)
    shares = {
        "loss_weight": sequence_weights(case.aggregation, counts, *totals, CONSTANT),
        "token_weight": sequence_weights("token-mean", counts, *totals),
    }
    return [
        pack(
            [task.samples[n] for n in part],
            {name: [values[n] for n in part] for name, values in task.given.items()},
            {name: [values[n] for n in part] for name, values in shares.items()}
            | {"sequence": [float(number) for number in range(len(part))]},
            multiple,
        )
        for part in parts
    ]


def train(
    task: Task, parallel: ParallelConfig, cases: Sequence[Case], options: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """On one rank: each case from the same weights and a new optimizer's state. options: more of the engine's."""
    arguments = {"precision": "fp32", "optimizer": ADAM, "timeout": 30, "chunk_size": 16, **(options or {})}
    engine = MegatronEngine(task.role, task.model.config, parallel, **arguments)
    return [train_case(engine, task, case) for case in cases]


def train_all(work: Sequence[tuple[Any, ...]]) -> list[list[Outcome]]:
    """`train` with each of these arguments, one after another in the same processes."""
    return [train(*item) for item in work]


def train_case(engine: MegatronEngine, task: Task, case: Case) -> Outcome:
    forget_states(engine)
    load(engine, task.weights)
    own = own_samples(case, engine.groups.coordinates.data, engine.groups.grid.data_parallel_size)
    batches = batches_of(task, case, engine.parallel, own)
    found = engine.forward(batches, TEMPERATURE, with_entropy=True)
    pairs = list(zip(found, batches, strict=True))
    unpacked = {name: [v for result, batch in pairs for v in unpack(result[name], batch)] for name in found[0]}
    masks = [np.asarray(task.samples[n].loss_mask) for n in own]
    outputs = {
        number: {name: values[place][masks[place]] for name, values in unpacked.items()}
        for place, number in enumerate(own)
    }
    objective = objective_of(task.role, case.policy_loss, engine.groups.context)
    result = engine.train_step(batches, objective, ADAM.lr, TEMPERATURE, with_entropy=task.role == "actor")
    assert result.applied
    join_gradients(engine)
    gradients = {name: p.main_grad.numpy().copy() for name, p in local_parameters(engine.chunks).items()}
    weights = {name: parameter.numpy().copy() for name, parameter in engine.parameters().items()}
    return Outcome(outputs, result.sums, result.grad_norm, gradients, weights)


def forget_states(engine: MegatronEngine) -> None:
    for inner in engine.optimizer.chained_optimizers:
        inner.optimizer.state.clear()
        for group in inner.optimizer.param_groups:
            group["step"] = 0


def join_gradients(engine: MegatronEngine) -> None:
    """The distributed optimizer leaves each data and context parallel rank with the sums of its own part."""
    group = engine.groups.data_and_context
    for chunk in engine.chunks:
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


# ------------------------------------------------------------------------------------------------ comparing


def whole(layout: Layout, of_rank: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Whole tensors under their names on disk, from the parameters (or their gradients) of all ranks. Every copy of an
    element must be the same."""
    joined = {name: np.full(shape, np.nan, np.float32) for name, shape in layout.tensors.items()}
    for rank, parameters in enumerate(of_rank):
        shard = layout.shard(rank)
        assert {n: p.shape for n, p in parameters.items()} == {n: tuple(s) for n, s in shard.parameters.items()}
        for piece in shard.pieces:
            target, source = (
                array.reshape(len(array), -1)[rect.row0 : rect.row1, rect.col0 : rect.col1]
                for array, rect in ((joined[piece.tensor], piece.rect), (parameters[piece.parameter], piece.local))
            )
            error = relative_error(source, np.where(np.isnan(target), source, target))
            assert error < 1e-6, (
                f"rank {rank} has another {piece.tensor} in {piece.parameter} than ranks before: {error}"
            )
            target[:] = source
    assert not any(np.isnan(tensor).any() for tensor in joined.values())
    return joined


def relative_error(found: Any, wanted: Any) -> float:
    """The largest difference as a share of the largest number."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if not wanted.size:
        return 0.0
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-6))


def compare(found: Outcome, wanted: Outcome) -> Iterator[str]:
    """What differs, in words."""
    if found.outputs.keys() != wanted.outputs.keys():
        yield f"samples {sorted(found.outputs)}, not {sorted(wanted.outputs)}"
    if found.sums.keys() != wanted.sums.keys():
        yield f"sums {sorted(found.sums)}, not {sorted(wanted.sums)}"
    pairs: list[tuple[str, Any, Any]] = [
        (f"{name} of sample {number}", values, wanted.outputs[number][name])
        for number, of_sample in found.outputs.items()
        for name, values in of_sample.items()
    ]
    for name, value in wanted.sums.items():
        error = abs(found.sums[name] - value) / max(wanted.magnitudes[name], 1e-6)
        if error >= TOLERANCE:
            yield f"{name}: {error:.1e}"
    pairs += [("gradient norm", found.grad_norm, wanted.grad_norm)]
    pairs += [(f"gradient of {n}", found.gradients[n], gradient) for n, gradient in wanted.gradients.items()]
    pairs += [(f"{n} after the step", found.weights[n], weight) for n, weight in wanted.weights.items()]
    for what, one, other in pairs:
        error = relative_error(one, other)
        if error >= TOLERANCE:
            yield f"{what}: {error:.1e}"


def joined(task: Task, parallel: ParallelConfig, of_rank: Sequence[Outcome]) -> Outcome:
    """The ranks' outcomes as one. Their scalars must be the same; so must outputs that several ranks have."""
    grid = RankGrid(len(of_rank), parallel)
    layout = megatron_layout(task.declaration, grid, padded_vocab_size(VOCAB_SIZE, parallel.tensor), fused_norms=False)
    outputs: dict[int, Mapping[str, np.ndarray]] = {}
    for rank, outcome in enumerate(of_rank):
        assert outcome.sums == of_rank[0].sums, f"rank {rank} has other sums than rank 0"
        assert outcome.grad_norm == of_rank[0].grad_norm, f"rank {rank} has another gradient norm than rank 0"
        for number, of_sample in outcome.outputs.items():
            for name, values in of_sample.items():
                assert relative_error(values, outputs.get(number, of_sample)[name]) < 1e-6, f"rank {rank}: {name}"
        outputs = {**outcome.outputs, **outputs}
    return Outcome(
        outputs,
        of_rank[0].sums,
        of_rank[0].grad_norm,
        whole(layout, [outcome.gradients for outcome in of_rank]),
        whole(layout, [outcome.weights for outcome in of_rank]),
    )
