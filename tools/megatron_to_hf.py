#!/usr/bin/env python
"""Turn a Megatron checkpoint into a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from megarl.model.hf_config import DTYPES
from megarl.ops.commands import EXIT_STATUS, Steps, add_parallel, asked_parallel, leave, run
from megarl.ops.convert import megatron_to_hf
from megarl.ops.folders import ROLES, open_checkpoint

DESCRIPTION = f"""\
Turn a Megatron checkpoint into a Hugging Face folder: safetensors, index, config and tokenizer. The checkpoint is what
tools/hf_to_megatron.py wrote, a role's folder in a run's checkpoint (its optimizer is left alone), or the folder of the
step with --role. Names and shapes are checked against the config before a weight is read.

One process holds the whole model about twice; under torchrun the processes share it.

exit status: 0 written, 2 the checkpoint is not of this model or cannot be read, or OUT may not be written
{EXIT_STATUS}

examples:
  python tools/megatron_to_hf.py /checkpoints/qwen3 /models/qwen3_again
  python tools/megatron_to_hf.py runs/x/checkpoints/step_000010/actor /models/x_step10 --hf /models/Qwen3-0.6B
  python tools/megatron_to_hf.py runs/x/checkpoints/step_000010 /models/x_step10 --role critic --hf /models/Qwen3-0.6B
  torchrun --nproc-per-node 4 tools/megatron_to_hf.py /checkpoints/llama /models/llama_again
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run(partial(_convert, options), options.deadline)


def _convert(options: argparse.Namespace, steps: Steps, console: Console) -> int:
    model = megatron_to_hf(
        open_checkpoint(options.checkpoint, options.role, options.hf),
        options.out,
        options.precision,
        asked_parallel(options),
        options.overwrite,
        options.deadline,
        steps,
    )
    if model.rank == 0:
        console.print(f"{options.out}: {model}; held as {model.layout.name}", markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a Megatron checkpoint, or a step's folder with --role"
    )
    parser.add_argument("out", metavar="OUT", help="the Hugging Face folder")
    parser.add_argument("--hf", metavar="HF_FOLDER", help="where config and tokenizer are; default CHECKPOINT/hf")
    parser.add_argument("--role", choices=ROLES, help="which of a step's roles; else what the checkpoint holds")
    parser.add_argument("--precision", choices=list(DTYPES), help="of what is written; default: as in the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights that OUT holds")
    add_parallel(parser)
    return parser


if __name__ == "__main__":
    leave(main())
