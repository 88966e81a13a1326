"""Measure a training step: tokens/s, MFU and peak memory for a shape, a length distribution and a layout.

    torchrun --nproc-per-node 1 tools/bench/train.py --shape qwen2.5-0.5b
    torchrun --nproc-per-node 2 tools/bench/train.py --shape llama-3.1-8b --tensor 2 --sequence

Weights are random: speed does not depend on them. A step is one optimizer step of the PPO objective over
`--micro-batches` packed micro-batches of about `--tokens` tokens each on every data-parallel rank. Prints one JSON line
with medians over `--steps` steps after `--warmup`. MFU is model FLOPs (no recompute counted) over the peak of the GPU;
without a GPU it is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from shapes import SHAPES, make_config

from megarl.config import ActorConfig, CriticConfig, OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack
from megarl.engines.flops import peak_flops, train_flops
from megarl.engines.megatron import MegatronEngine
from megarl.engines.objectives import policy_objective, value_objective
from megarl.ops.commands import join
from megarl.parallel import device


def main() -> None:
    args = parse_arguments()
    join(300)
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel = ParallelConfig(args.tensor, args.pipeline, args.virtual_pipeline, args.context, sequence=args.sequence)
    hf_config = make_config(args.shape)
    recompute = RecomputeConfig(args.recompute, args.modules, args.recompute_layers, not args.keep_swiglu)
    engine = MegatronEngine(
        args.role,
        hf_config,
        parallel,
        precision="bf16" if device.is_cuda() else "fp32",
        optimizer=OptimizerConfig(lr=1e-6),
        recompute=recompute,
        offload_activations=args.offload,
        fused_output=not args.whole_logits,
        compiles=not args.no_compile,
        chunk_size=args.chunk,
    )
    batches = make_batches(args, hf_config.vocab_size, parallel.sequence_multiple)
    lengths = [int(n) for batch in batches for n in batch.lengths]
    objective = policy_objective(ActorConfig()) if args.role == "actor" else value_objective(CriticConfig())
    data_parallel = parallel.data_parallel(world)

    def train() -> None:
        engine.train_step(batches, objective, lr=1e-6, with_entropy=args.entropy and args.role == "actor")

    def forward() -> None:
        engine.forward(batches, with_entropy=args.entropy and args.role == "actor")

    device.reset_peak_memory()
    outputs = hf_config.vocab_size if args.role == "actor" else 1
    flops = train_flops(hf_config, lengths, outputs) * data_parallel
    peak = peak_flops(device.name())
    result: dict[str, Any] = {"shape": args.shape, "role": args.role, "world": world, "parallel": repr(parallel)}
    for name, work, share in (("train", train, 1.0), ("forward", forward, 1 / 3)):
        seconds, spread = median_seconds(work, args.warmup, args.steps)
        tokens = sum(lengths) * data_parallel
        result[name] = {
            "seconds": round(seconds, 4),
            "spread": round(spread, 4),
            "tokens_per_s": round(tokens / seconds),
        }
        if peak is not None:
            result[name]["mfu"] = round(flops * share / (seconds * peak * world), 4)
    memory = device.memory_statistics()
    result |= {"tokens": sum(lengths), "mean_length": round(statistics.mean(lengths), 1), "torch": torch.__version__}
    result |= {
        "max_allocated_gb": round(memory.max_allocated / 1e9, 2),
        "max_reserved_gb": round(memory.max_reserved / 1e9, 2),
    }
    result |= {
        "recompute": args.recompute,
        "swiglu_kept": args.keep_swiglu,
        "offload": args.offload,
        "fused_output": not args.whole_logits,
        "chunk": args.chunk,
        "compile": not args.no_compile,
    }
    if args.profile and rank == 0:
        profile(train)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def make_batches(args: argparse.Namespace, vocab: int, multiple: int) -> list[PackedBatch]:
    """Micro-batches packed to about --tokens, of log-normal lengths around --mean, or all of --length."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(args.micro_batches):
        sequences, total = [], 0
        while True:
            length = args.length or int(np.clip(random.lognormal(np.log(args.mean), 0.35), 64, 4 * args.mean))
            if total + length > args.tokens * args.context and sequences:
                break
            prompt = max(length // 3, 1)
            sequences.append(
                TokenSequence(random.integers(0, vocab, length), prompt, np.ones(length - prompt, np.bool_))
            )
            total += length
        responses = [len(s.loss_mask) for s in sequences]
        weight = 1.0 / (sum(responses) * args.micro_batches)
        names = ("old_logprobs", "advantages", "old_values", "returns")
        per_token = {name: [random.normal(size=n).astype(np.float32) for n in responses] for name in names}
        per_sequence = {name: [weight] * len(sequences) for name in ("loss_weight", "token_weight")}
        batches.append(pack(sequences, per_token, per_sequence, multiple))
    return batches


def median_seconds(work: Any, warmup: int, steps: int) -> tuple[float, float]:
    """(median, largest less smallest) of the wall time of a call, the device waited for."""
    times = []
    for step in range(warmup + steps):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        if step >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times), max(times) - min(times)


def profile(work: Any) -> None:
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as torch_profile

    activity = ProfilerActivity.CUDA if device.is_cuda() else ProfilerActivity.CPU
    # The third of three steps: the clocks of a GPU that was idle are not those of one at work.
    with torch_profile(activities=[activity], schedule=schedule(wait=0, warmup=2, active=1, repeat=1)) as found:
        for _ in range(3):
            work()
            device.synchronize()
            found.step()
    key = "cuda_time_total" if device.is_cuda() else "cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90), flush=True)
    if device.is_cuda():
        print(idle_times(found.events()), flush=True)


def idle_times(events: Any, count: int = 12) -> str:
    """How long the GPU stood still in all, and the longest times with the kernels before and behind."""
    kernels = sorted((e for e in events if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    gaps, end, last = [], kernels[0].time_range.start, kernels[0].name
    for kernel in kernels:
        if kernel.time_range.start > end:
            gaps.append((kernel.time_range.start - end, last, kernel.name))
        if kernel.time_range.end > end:
            end, last = kernel.time_range.end, kernel.name
    span = end - kernels[0].time_range.start
    lines = [f"the GPU stood still for {sum(g[0] for g in gaps) / 1e3:.1f} of {span / 1e3:.1f} ms"]
    for gap, before, behind in sorted(gaps, reverse=True)[:count]:
        lines.append(f"{gap / 1e3:8.2f} ms between {before[:60]} and {behind[:60]}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--role", choices=("actor", "critic"), default="actor")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch on one GPU")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--mean", type=int, default=240, help="mean length of the log-normal distribution")
    parser.add_argument("--length", type=int, default=0, help="all sequences of this length instead")
    for name in ("tensor", "pipeline", "virtual-pipeline", "context"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sequence", action="store_true", help="sequence parallel")
    parser.add_argument("--recompute", choices=("none", "selective", "block", "full"), default="none")
    parser.add_argument("--modules", nargs="+", default=["core_attn"], help="of selective recompute")
    parser.add_argument("--recompute-layers", type=int, default=1, help="recompute.num_layers, of block and full")
    parser.add_argument("--keep-swiglu", action="store_true", help="recompute.swiglu=false")
    parser.add_argument("--offload", nargs="+", default=[], help="modules whose activations wait in host memory")
    parser.add_argument(
        "--whole-logits", action="store_true", help="do not fuse the output projection with the log-probs"
    )
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits are held in float32 at once")
    parser.add_argument("--no-compile", action="store_true", help="model.compile=false: no kernels of our own")
    parser.add_argument("--entropy", action="store_true", help="compute the entropy too")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
