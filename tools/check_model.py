#!/usr/bin/env python
"""Admit a model: compare megarl's log-probs and gradients with transformers'."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config import OptimizerConfig, ParallelConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack, unpack
from megarl.engines.hf import views_on_disk
from megarl.engines.megatron import MegatronEngine, TokenBatch, TokenOutputs
from megarl.model.families import declare
from megarl.model.gpt import local_parameters
from megarl.model.hf_config import DTYPES, check_supported
from megarl.model.role_layout import role_layout
from megarl.ops.commands import at_least, join, leave, torchrun_rank
from megarl.parallel import device
from megarl.reshard import hf_files
from megarl.reshard.checksum import matrix
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import hf_layout

DESCRIPTION = """\
Admit a model: build it under megarl from a Hugging Face folder and compare log-probs and gradients with transformers'.

Random tokens go through both, once packed into one micro-batch and once padded to one length, a micro-batch each. In
fp32 the two must agree up to rounding. In bf16 megarl may be at most three times as far from transformers in fp32 as
transformers in bf16 is: fp32 is the sharper test, bf16 that of Transformer Engine's layers on a GPU. Every process
holds the transformers model beside its part of megarl's.

exit status: 0 admitted, 1 the results differ, 2 the model is refused or cannot be read

examples:
  python tools/check_model.py /models/Qwen3-0.6B
  torchrun --nproc-per-node 2 tools/check_model.py /models/Qwen3-0.6B --tensor 2 --sequence
"""

LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3
"""In fp32: the greatest difference of a log-prob, and the difference of a tensor's gradient over its norm (L2)."""

BF16_FACTOR = 3.0
"""In bf16: how much further than transformers in bf16 megarl may be from transformers in fp32."""

GROUPS = (
    ("router", r"mlp\.gate\.weight"),
    ("experts", r"mlp\.experts\."),
    ("feed-forward", r"mlp\."),
    ("norms", r"norm\.weight"),
    ("attention", r"self_attn\."),
    ("embeddings", r""),
)
"""What a gradient is reported under: the first whose pattern is found in its name."""

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the table: an error for each way to batch, and what it may be."""

    what: str
    errors: tuple[float, ...]
    limit: float
    worst: str = ""

    @property
    def is_good(self) -> bool:
        return all(error <= self.limit for error in self.errors)  # False for NaN


@dataclass(frozen=True)
class Reference:
    """What transformers says of the sequences."""

    logprobs: list[np.ndarray]  # [tokens - 1] each
    gradients: Gradients  # named as on disk


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rank = torchrun_rank()
    console = Console(stderr=rank > 0)
    try:
        join(options.deadline)
        rows = check(options)
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"rank {rank}: " if rank else "", f"[red]not admitted[/red]: {error}", sep="", highlight=False)
        return 2
    if rank == 0:
        _report(console, options, rows)
    return 0 if all(row.is_good for row in rows) else 1


def check(options: argparse.Namespace) -> list[Row]:
    """Compare; the same rows on every rank. Collective: torch.distributed is initialised.

    Raises ValueError when the model is refused, or OSError when it cannot be read."""
    folder = os.path.abspath(options.folder)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{folder} holds no config.json; give a Hugging Face folder")
    hf_config = AutoConfig.from_pretrained(folder)
    check_supported(hf_config)
    parallel = ParallelConfig(
        tensor=options.tensor,
        pipeline=options.pipeline,
        context=options.context,
        expert=options.expert,
        expert_tensor=options.expert_tensor,
        sequence=options.sequence,
    )
    engine, layout = _engine(folder, hf_config, parallel, options.precision)
    size = engine.groups.grid.data_parallel_size
    sequences = _sequences(-(-options.sequences // size) * size, options.length, hf_config)
    weights = [w / sum(len(tokens) for tokens in sequences) for w in _random_weights(sequences)]

    reference = _transformers(folder, torch.float32, sequences, weights)
    limits = {"logprobs": LOGPROB_LIMIT, **dict.fromkeys((name for name, _ in GROUPS), GRADIENT_LIMIT)}
    in_bf16 = options.precision == "bf16"
    if in_bf16:
        own = _transformers(folder, torch.bfloat16, sequences, weights)
        differences = [np.abs(a - b) for a, b in zip(own.logprobs, reference.logprobs, strict=True)]
        limits["logprobs"] = BF16_FACTOR * float(np.concatenate(differences).mean())
        squares = {name: _square(own.gradients[name] - whole) for name, whole in reference.gradients.items()}
        worst_in_bf16 = _worst_of_groups(squares, reference.gradients)
        limits |= {group: BF16_FACTOR * error for group, (error, _) in worst_in_bf16.items()}

    found = [_megarl(engine, layout, batches, reference) for batches in _batches(engine, sequences, weights)]
    logprobs = tuple(mean if in_bf16 else greatest for greatest, mean, _ in found)
    rows = [Row(f"log-probs ({'mean' if in_bf16 else 'greatest'})", logprobs, limits["logprobs"])]
    worst = [_worst_of_groups(squares, reference.gradients) for *_, squares in found]
    for group in worst[0]:
        errors = tuple(of_batching[group][0] for of_batching in worst)
        name = max((of_batching[group] for of_batching in worst), key=lambda pair: pair[0])[1]
        rows.append(Row(f"gradient: {group}", errors, limits[group], name))
    return rows


# ------------------------------------------------------------------------------------------------ the two sides


def _engine(folder: str, hf_config: Any, parallel: ParallelConfig, precision: Any) -> tuple[MegatronEngine, Layout]:
    """An actor with the folder's weights whose optimizer step changes nothing, and the layout of its weights."""
    still = OptimizerConfig(kind="sgd", lr=0.0, weight_decay=0.0, clip_grad=0.0)
    engine = MegatronEngine("actor", hf_config, parallel, precision, optimizer=still)
    layout = role_layout("actor", hf_config, parallel, dist.get_world_size(), engine.uses_fused_norms)
    planned = {name: tuple(shape) for name, shape in layout.shard(engine.groups.rank).parameters.items()}
    parameters = engine.parameters()
    built = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name in sorted(planned.keys() | built.keys()):
        if planned.get(name) != built.get(name):
            raise ValueError(f"{name} is {planned.get(name)} in the family's layout, {built.get(name)} in Megatron")
    hf_files.load(folder, layout, engine.groups.rank, parameters, hf_layout(declare(hf_config)))
    engine.mark_weights_loaded()
    return engine, layout


def _transformers(
    folder: str, dtype: torch.dtype, sequences: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device.device())
    model.eval()
    logprobs = []
    for tokens, weight in zip(sequences, weights, strict=True):
        ids = torch.tensor(tokens, device=device.device())
        log_softmax = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), dim=-1)
        found = log_softmax.gather(1, ids[1:, None])[:, 0]
        (found * torch.tensor(weight, device=device.device())).sum().backward()
        logprobs.append(found.detach().cpu().numpy())
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients |= {on_disk: view.float().cpu() for on_disk, view in views_on_disk(name, gradient)}
    return Reference(logprobs, gradients)


def _batches(
    engine: MegatronEngine, sequences: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> list[list[tuple[PackedBatch, list[int]]]]:
    """This rank's micro-batches, with the sequences in them, for each way: packed, padded to one length."""
    multiple = engine.parallel.sequence_multiple
    own = list(range(engine.groups.coordinates.data, len(sequences), engine.groups.grid.data_parallel_size))

    def batch(numbers: list[int], padded: int) -> tuple[PackedBatch, list[int]]:
        items = [TokenSequence(sequences[n], 1, np.ones(len(sequences[n]) - 1, dtype=bool)) for n in numbers]
        return pack(items, {"weight": [weights[n] for n in numbers]}, multiple=padded), numbers

    longest = -(-max(len(tokens) for tokens in sequences) // multiple) * multiple
    return [[batch(own, multiple)], [batch([number], longest) for number in own]]


def _megarl(
    engine: MegatronEngine, layout: Layout, batches: Sequence[tuple[PackedBatch, list[int]]], reference: Reference
) -> tuple[float, float, dict[str, float]]:
    """(greatest and mean difference of log-probs, the squared difference of each tensor's gradient), over all ranks."""
    packed = [batch for batch, _ in batches]
    differences = []
    for output, (batch, numbers) in zip(engine.forward(packed), batches, strict=True):
        for number, found in zip(numbers, unpack(output["logprobs"], batch), strict=True):
            differences.append(np.abs(found - reference.logprobs[number]))

    def loss(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        assert outputs.logprobs is not None, "an actor gives log-probs"
        return (batch.per_token["weight"] * batch.mask * outputs.logprobs).sum(), {}

    engine.train_step(packed, loss, 0.0)
    gradients = {name: p.main_grad.float().cpu() for name, p in local_parameters(engine.chunks).items()}
    squares = dict.fromkeys(reference.gradients, 0.0)
    for piece in layout.shard(engine.groups.rank).pieces:
        rect, local = piece.rect, piece.local
        found = matrix(gradients[piece.parameter])[local.row0 : local.row1, local.col0 : local.col1]
        wanted = matrix(reference.gradients[piece.tensor])[rect.row0 : rect.row1, rect.col0 : rect.col1]
        squares[piece.tensor] += _square(found - wanted)
    every = np.concatenate(differences).astype(np.float64)
    sums = torch.tensor([every.sum(), len(every)], dtype=torch.float64, device=device.device())
    # Of a tensor that is split, the rank that is furthest off counts.
    greatest = torch.tensor([every.max(), *squares.values()], dtype=torch.float64, device=device.device())
    dist.all_reduce(sums)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    total, count = sums.tolist()
    worst, *found_squares = greatest.tolist()
    return worst, total / count, dict(zip(squares, found_squares, strict=True))


def _worst_of_groups(squares: Mapping[str, float], gradients: Gradients) -> dict[str, tuple[float, str]]:
    """For each group of tensors the greatest relative difference of a gradient and the tensor's name. Relative to the
    tensor's own gradient, or to a ten-thousandth of all where that is more: some are zero but for rounding."""
    norms = {name: _square(gradient) for name, gradient in gradients.items()}
    least = 1e-4 * sum(norms.values()) ** 0.5
    worst: dict[str, tuple[float, str]] = {}
    for name, square in squares.items():
        group = next(group for group, pattern in GROUPS if re.search(pattern, name))
        error = square**0.5 / max(norms[name] ** 0.5, least, 1e-30)
        if group not in worst or not error <= worst[group][0]:
            worst[group] = (error, name)
    return worst


def _square(tensor: torch.Tensor) -> float:
    return float((tensor.double() ** 2).sum())


def _sequences(count: int, length: int, hf_config: Any) -> list[np.ndarray]:
    """Random tokens; the first has the full length, the others from a quarter of it. The padding token is not among
    them: transformers gives its embedding no gradient, though it may stand in a text."""
    generator = np.random.default_rng(0)
    padding = getattr(hf_config, "pad_token_id", None)
    tokens = np.setdiff1d(np.arange(hf_config.vocab_size), [] if padding is None else [padding])
    lengths = [length, *generator.integers(max(length // 4, 2), length + 1, count - 1)]
    return [generator.choice(tokens, int(n)) for n in lengths]


def _random_weights(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.normal(size=len(tokens) - 1).astype(np.float32) for tokens in sequences]


# ------------------------------------------------------------------------------------------------ the command line


def _report(console: Console, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    table = Table("difference", "packed", "padded", "may be", "", Column("worst tensor", overflow="fold"))
    for row in rows:
        errors = [f"{error:.1e}" for error in row.errors]
        mark = "[green]equal[/green]" if row.is_good else "[red]DIFFERS[/red]"
        name = row.worst.removeprefix("model.").removesuffix(".weight")
        table.add_row(row.what, *errors, f"{row.limit:.1e}", mark, name)
    console.print(table)
    rope = getattr(AutoConfig.from_pretrained(options.folder), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or 0
    if original >= options.length:
        console.print(f"positions past the original {original} were not tried; --length sets how many tokens are")
    good = all(row.is_good for row in rows)
    verdict = "[green]admitted[/green]" if good else "[red]not admitted[/red]: megarl and transformers differ"
    console.print(f"{options.folder} in {options.precision} on {device.name()}: {verdict}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face folder: config.json and safetensors")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32", help="of megarl's model; default fp32")
    parser.add_argument("--sequences", type=at_least(1), default=4, help="how many; default 4")
    parser.add_argument("--length", type=at_least(2), default=96, help="tokens of the longest; default 96")
    for axis in ("tensor", "pipeline", "context", "expert", "expert-tensor"):
        parser.add_argument(f"--{axis}", type=at_least(1), default=1, help="under torchrun; default 1")
    parser.add_argument("--sequence", action="store_true", help="sequence parallel, beside --tensor")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for an exchange; default 600")
    return parser


if __name__ == "__main__":
    leave(main())
