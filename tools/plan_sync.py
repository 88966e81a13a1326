"""Print what one weight sync moves, for any sizes, without a GPU: from Megatron's layout into SGLang's.

    tools/plan_sync.py /models/Qwen2.5-7B --ranks 8 --tensor 2 --pipeline 2 --rollout-tensor 2
    tools/plan_sync.py config.json --ranks 64 --tensor 8 --pipeline 2 --rollout-tensor 8 --split

Needs the model's config.json only. Engine rank r shares the GPU of trainer rank r; with --split
the engines have GPUs of their own on other nodes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

from transformers import AutoConfig

from megarl.config import ParallelConfig
from megarl.model.families import declare
from megarl.model.role_layout import role_layout
from megarl.ops.weight_sync import plan_sync
from megarl.reshard.layouts import SGLANG_VOCAB_MULTIPLE, sglang_layout


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        print(describe(args))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def describe(args: argparse.Namespace) -> str:
    """The layouts and the plan's figures as text.

    Raises:
        ValueError: the model is not supported, or sizes do not divide.
    """
    folder = os.path.dirname(args.model) if args.model.endswith(".json") else args.model
    hf_config = AutoConfig.from_pretrained(folder or ".")
    declaration = declare(hf_config)
    parallel = ParallelConfig(
        args.tensor,
        args.pipeline,
        args.virtual_pipeline,
        args.context,
        args.expert,
        first_stage_layers=args.first_stage_layers,
        last_stage_layers=args.last_stage_layers,
    )
    source = role_layout("actor", hf_config, parallel, args.ranks, fused_norms=True)
    engine_ranks = args.engine_ranks or args.ranks
    if engine_ranks % args.rollout_tensor:
        raise ValueError(f"--rollout-tensor {args.rollout_tensor} does not divide the {engine_ranks} engine ranks")
    if not args.split and engine_ranks > args.ranks:
        raise ValueError(f"{engine_ranks} engine ranks on {args.ranks} trainer GPUs; give --split or fewer of them")
    num_replicas = engine_ranks // args.rollout_tensor
    target = sglang_layout(declaration, args.rollout_tensor, num_replicas, SGLANG_VOCAB_MULTIPLE)
    start = time.perf_counter()
    made = plan_sync(source, target, args.bytes, args.gpus_per_node, args.bucket_mb * 2**20, args.split)
    seconds = time.perf_counter() - start
    parameters = sum(math.prod(shape) for shape in declaration.tensors().values())
    return "\n".join(
        (
            f"model    {parameters / 1e9:.2f} B parameters, {parameters * args.bytes / 1e9:.2f} GB",
            f"trainer  {source.name}, {args.ranks} ranks",
            f"engine   {target.name}{' on GPUs of its own' if args.split else ''}",
            f"plan     {len(made.copies):,} copies, made in {seconds:.2f} s",
            f"sync     {made.summary()}",
        )
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder, or its config.json")
    parser.add_argument("--ranks", type=int, required=True, help="trainer ranks")
    for name in ("tensor", "pipeline", "virtual-pipeline", "context", "expert"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"the actor's {name} parallel size")
    for name in ("first", "last"):
        parser.add_argument(
            f"--{name}-stage-layers", type=int, default=0, help=f"layers on the {name} pipeline stage; default: even"
        )
    parser.add_argument("--rollout-tensor", type=int, default=1, help="tensor-parallel size of one SGLang replica")
    parser.add_argument(
        "--engine-ranks", type=int, default=0, help="GPUs of all replicas; default: as many as trainers"
    )
    parser.add_argument("--split", action="store_true", help="engines on other nodes than the trainers")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--bytes", type=int, default=2, help="bytes of one element: 2 for bf16")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
