#!/usr/bin/env python
"""Compare two folders of weights bit for bit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from megarl.model.hf_config import DTYPES
from megarl.ops.commands import EXIT_STATUS, Steps, add_parallel, asked_parallel, leave, run
from megarl.ops.folders import Weights, open_pair
from megarl.ops.verify import Comparison, Result, compare
from megarl.reshard.transports import dtype_name

DESCRIPTION = f"""\
Compare two folders of weights, each a Hugging Face folder or a Megatron checkpoint, tensor by tensor and bit for bit.
Where one stores a narrower type than the other, the wider is cast to it first.

A Megatron checkpoint is held whole (under torchrun: by all processes together); of Hugging Face folders a part of one
tensor at a time.

exit status: 0 equal, 1 they differ, 2 they are not the same model, or cannot be read
{EXIT_STATUS}

examples:
  python tools/verify_weights.py /models/Qwen3-0.6B /checkpoints/qwen3
  python tools/verify_weights.py runs/x/model runs/x/checkpoints/step_000010/actor
  python tools/verify_weights.py /models/a /checkpoints/b --precision bf16
"""

SHOWN = 20
"""So many of the tensors that differ are shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run(partial(_verify, options), options.deadline)


def _verify(options: argparse.Namespace, steps: Steps, console: Console) -> int:
    a, b = open_pair(options.a, options.b, options.hf)
    result = compare(a, b, options.precision, asked_parallel(options), options.deadline, steps)
    if dist.get_rank() == 0:
        _report(console, a, b, result)
    return 1 if result.different else 0


def _report(console: Console, a: Weights, b: Weights, result: Result) -> None:
    table = Table("", Column("folder", overflow="fold"), "kind", "role", "stored as", "checksum")
    for name, side, weights in (("A", 0, a), ("B", 1, b)):
        stored = ", ".join(sorted(map(dtype_name, weights.dtypes)))
        table.add_row(name, weights.folder, weights.kind, weights.role, stored, result.checksum(side))
    console.print(table, soft_wrap=False)
    differing = result.different
    if differing:
        _report_different(console, differing)
    compared = dtype_name(result.dtype)
    if a.dtypes != b.dtypes or a.dtypes != {result.dtype}:
        compared += ", after casting: the stored types differ from it"
    numbers = f"{len(result.tensors)} tensors, {result.num_elements:,} elements, compared as {compared}"
    if not differing:
        console.print(f"[green]equal[/green]: {numbers}")
        return
    elements = sum(tensor.num_different for tensor in differing.values())
    what = (
        f"{len(differing)} tensor{'s' if len(differing) > 1 else ''}, {elements:,} element{'s' if elements > 1 else ''}"
    )
    console.print(f"[red]DIFFERENT[/red] in {what} of {numbers}")


def _report_different(console: Console, differing: dict[str, Comparison]) -> None:
    for name, tensor in list(differing.items())[:SHOWN]:
        (a, b), (sum_a, sum_b) = tensor.values, tensor.checksums
        console.print(
            f"{name}: {tensor.num_different:,} of {math.prod(tensor.shape):,} elements\n"
            f"    first at {tensor.index}: {a:.9g} in A, {b:.9g} in B; checksums {sum_a:016x}, {sum_b:016x}",
            markup=False,
        )
    if len(differing) > SHOWN:
        console.print(f"and {len(differing) - SHOWN} more")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="a Hugging Face folder or a Megatron checkpoint")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--hf", metavar="HF_FOLDER", help="the config of a checkpoint that has none beside it")
    parser.add_argument("--precision", choices=list(DTYPES), help="compare as this; default: the narrower of the two")
    add_parallel(parser)
    return parser


if __name__ == "__main__":
    leave(main())
