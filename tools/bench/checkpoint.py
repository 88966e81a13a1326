"""Measure a checkpoint of one role with its optimizer: how long it holds training up, how long the files take, and the
host memory that it needs meanwhile.

    torchrun --nproc-per-node 1 tools/bench/checkpoint.py --shape qwen2.5-1.5b --folder /scratch
    torchrun --nproc-per-node 2 tools/bench/checkpoint.py --shape tiny --tensor 2 --folder /tmp

Weights are random. Each of `--saves` saves follows a training step, and goes on while the next steps are made. Prints
one JSON line a save from rank 0, and the mean seconds of a step with and without files being written beside it. The
first save of a process also sets up what later ones have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from shapes import SHAPES, make_config
from train import make_batches

from megarl.config import ActorConfig, OptimizerConfig, ParallelConfig
from megarl.engines.megatron import MegatronEngine
from megarl.engines.objectives import policy_objective
from megarl.ops.commands import join
from megarl.parallel import device


def main() -> None:
    args = parse_arguments()
    join(600)
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel, hf_config = ParallelConfig(args.tensor, args.pipeline), make_config(args.shape)
    precision = "bf16" if device.is_cuda() else "fp32"
    engine = MegatronEngine("actor", hf_config, parallel, precision=precision, optimizer=OptimizerConfig(lr=1e-6))
    batches = make_batches(args, hf_config.vocab_size, parallel.sequence_multiple)
    objective = policy_objective(ActorConfig())

    def step() -> float:
        device.synchronize()
        start = time.perf_counter()
        engine.train_step(batches, objective, lr=1e-6)
        device.synchronize()
        return time.perf_counter() - start

    folder = [tempfile.mkdtemp(dir=args.folder) if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    step()
    alone, beside = [step() for _ in range(3)], []
    try:
        for number in range(args.saves):
            result, busy = save(engine, os.path.join(folder[0], str(number)), step)
            beside += busy
            if rank == 0:
                print(json.dumps({"shape": args.shape, "world": world, "save": number} | result), flush=True)
                shutil.rmtree(os.path.join(folder[0], str(number)))
            dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    if rank == 0:
        seconds = {"alone": statistics.mean(alone), "beside": statistics.mean(beside) if beside else None}
        print(json.dumps({"step_seconds": seconds}), flush=True)
    dist.destroy_process_group()


def save(engine: MegatronEngine, folder: str, step: Any) -> tuple[dict[str, float], list[float]]:
    """One save, and the seconds of the steps that were made while its files were written."""
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    pending = engine.start_save(folder)
    blocked, most, steps = time.perf_counter() - start, process.memory_info().rss, []
    while not all_ranks(pending.is_written):
        steps.append(step())
        most = max(most, process.memory_info().rss)
    written = time.perf_counter() - start
    start = time.perf_counter()
    pending.finish()
    return {
        "blocks_s": round(blocked, 3),
        "written_s": round(written, 3),
        "index_s": round(time.perf_counter() - start, 3),
        "rank_gb": round(pending.num_bytes / 1e9, 3),
        "host_gb_over_baseline": round((most - before) / 1e9, 3),
    }, steps


def all_ranks(holds: bool) -> bool:
    """Whether it holds on all: every rank makes as many steps as the others."""
    flag = torch.tensor([int(holds)], device=device.device())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--folder", required=True, help="where checkpoints are written, and removed again")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch on one GPU")
    parser.set_defaults(micro_batches=1, mean=240, length=0, context=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
