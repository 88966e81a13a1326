#!/usr/bin/env python
"""Turn a Hugging Face folder into a Megatron checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from megarl.model.hf_config import DTYPES
from megarl.ops.commands import EXIT_STATUS, Steps, add_parallel, asked_parallel, leave, run
from megarl.ops.convert import hf_to_megatron
from megarl.ops.folders import ROLES, open_hf

DESCRIPTION = f"""\
Turn a Hugging Face folder into a Megatron checkpoint (torch.distributed checkpoint): weights without optimizer, to be
loaded under any parallel sizes, on CPU or GPU. Config and tokenizer go into OUT/hf, so that tools/megatron_to_hf.py can
turn it back without the original.

One process holds the whole model about twice while it is built; under torchrun the processes share it.

exit status: 0 written, 2 the model is refused or cannot be read, or OUT may not be written
{EXIT_STATUS}

examples:
  python tools/hf_to_megatron.py /models/Qwen3-0.6B /checkpoints/qwen3
  python tools/hf_to_megatron.py /models/Qwen3-0.6B /checkpoints/qwen3_critic --role critic --precision fp32
  torchrun --nproc-per-node 4 tools/hf_to_megatron.py /models/Llama-3.1-8B /checkpoints/llama
  torchrun --nproc-per-node 4 tools/hf_to_megatron.py /models/Qwen3-30B-A3B /checkpoints/moe --pipeline 2 --expert 2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return run(partial(_convert, options), options.deadline)


def _convert(options: argparse.Namespace, steps: Steps, console: Console) -> int:
    model = hf_to_megatron(
        open_hf(options.folder, options.role),
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
    parser.add_argument("folder", metavar="HF_FOLDER", help="config.json and safetensors")
    parser.add_argument("out", metavar="OUT", help="the checkpoint's folder")
    parser.add_argument(
        "--role",
        choices=ROLES,
        help="default: critic where the folder has a value head (score.weight), else actor; a critic made of a "
        "language model starts with a head of zeros",
    )
    parser.add_argument("--precision", choices=list(DTYPES), help="of what is written; default: as in the files")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights that OUT holds")
    add_parallel(parser)
    return parser


if __name__ == "__main__":
    leave(main())
