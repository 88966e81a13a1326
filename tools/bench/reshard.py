"""Measure a weight sync, trainer to SGLang: export, exchange, load and verification, after a real optimizer step each.

    tools/bench/reshard.py --shape qwen2.5-0.5b
    tools/bench/reshard.py --shape qwen2.5-0.5b --gpus 2 --pipeline 2 --rollout-tensor 2
    tools/bench/reshard.py --shape qwen2.5-0.5b --gpus 1 --split 1

Builds what `megarl train` builds (Ray, trainer processes, SGLang) around a model of random weights, and goes through
`--steps` small steps after `--warmup`: answers, one optimizer step, sync. Prints one JSON line with medians in
milliseconds: `sync` with SGLang's memory in place all the time; `turn` with its memory released for training, from
waking its weights to waking its KV cache, by parts. With `--split N` SGLang has N more GPUs of its own, where nothing
is released: `sync` only. Without a GPU it runs on CPUs, to be tried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from shapes import SHAPES, write_model

from megarl import config as configuration
from megarl.driver import setup
from megarl.driver.loop import Session
from megarl.driver.step import Timer, learn, resident
from megarl.driver.stop import StopRequest
from megarl.train import start_ray
from megarl.types import SamplingParams

COPY = """
import time, torch
a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
for n in (3, 20):
    torch.cuda.synchronize(); start = time.perf_counter()
    for _ in range(n): b.copy_(a)
    torch.cuda.synchronize()
print(20 * 2**30 / (time.perf_counter() - start) / 1e9)
"""


def main() -> None:
    args = parse_arguments()
    on_gpu = torch.cuda.is_available()
    copy_rate = measured_copy_rate() if on_gpu else None
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        write_model(args.shape, model, torch.bfloat16 if on_gpu else torch.float32)
        config = make_run(args, folder, model, "bf16" if on_gpu else "fp32")
        created = setup.create_inputs(config)
        inputs = setup.prepare(created)
        start_ray(created)
        try:
            with StopRequest() as stop:
                session = setup.build(created, inputs, stop)
                with alone(args.lock):
                    print(json.dumps(measure(args, session, copy_rate)), flush=True)
                session.rollout.shutdown()
        finally:
            ray.shutdown()


def measured_copy_rate() -> float:
    """GB/s at which a GPU copies its own memory, bytes counted once; in a process of its own, for it keeps memory."""
    done = subprocess.run([sys.executable, "-c", COPY], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout)


def make_run(args: argparse.Namespace, folder: str, model: str, precision: str) -> configuration.Config:
    prompts = 8 * args.gpus
    sglang: dict[str, Any] = {"memory_fraction": args.memory_fraction, "max_running_requests": 64}
    if precision == "bf16":
        # Capturing graphs takes a minute, and no answer here is long.
        sglang["options"] = {"disable_cuda_graph": True, "max_total_tokens": args.max_tokens}
    offload = {"parameters": args.offload, "gradients": args.offload, "optimizer": args.offload}
    parallel = {"tensor": args.tensor, "pipeline": args.pipeline, "sequence": args.tensor > 1}
    return configuration.build(
        {
            "run": {"name": "bench", "dir": os.path.join(folder, "run"), "total_steps": 1, "save_model": False},
            "model": {"path": model, "precision": precision},
            "data": {
                "create": {"task": "addition", "max_operand": 9, "num_train": 64, "num_validation": 2},
                "prompts_per_step": prompts,
                "max_prompt_length": 16,
                "max_response_length": 16,
            },
            "actor": {
                "parallel": parallel,
                "offload": offload,
                "optimizer": {"lr": 1e-3},  # large enough to change every weight, of bfloat16 too
                "batch": {"mini_batch_prompts": prompts, "max_tokens_per_gpu": 2048},
                "entropy_coef": 0.01,  # all rewards are 0: it makes the gradient
            },
            "algorithm": {"advantage": "grpo"},
            "rollout": {
                "engine": "sglang",
                "n": 2,
                "tensor": args.rollout_tensor,
                "num_gpus": args.split,
                "sglang": sglang,
            },
            "reward": {"function": "exact"},
            "sync": {"bucket_mb": args.bucket_mb, "verify": args.verify},
            "cluster": {"gpus_per_node": args.gpus},
        }
    )


def measure(args: argparse.Namespace, session: Session, copy_rate: float | None) -> dict[str, Any]:
    steps = iter(range(1, 10**6))
    times: dict[str, list[float]] = {}
    optimizer_steps = {"actor": 0}
    refresh(session, 0, {}, sleeps=False)
    for sleeps in (False,) if args.split else (False, True):
        for number in range(args.warmup + args.steps):
            step = next(steps)
            batch = answers(session)
            if sleeps:
                session.rollout.sleep()
            learn(session.learning, batch, step, 0.0, optimizer_steps, Timer())
            session.group.call("freeing cached memory", "empty_cache")
            found: dict[str, float] = {}
            refresh(session, step, found, sleeps)
            if number >= args.warmup:
                for name, seconds in found.items():
                    times.setdefault(("turn: " if sleeps else "sync: ") + name, []).append(seconds)
    milliseconds = {name: round(1e3 * statistics.median(values), 2) for name, values in times.items()}
    spread = {name: round(1e3 * (max(values) - min(values)), 2) for name, values in times.items()}
    plan = dataclasses.asdict(session.sync.summary)
    per_gpu = plan["written"] / (args.split or args.gpus)
    result: dict[str, Any] = {"shape": args.shape, "gpus": args.gpus, "steps": args.steps}
    result |= {
        "source": f"tp{args.tensor} pp{args.pipeline}",
        "target": f"{session.config.num_replicas} x tp{args.rollout_tensor}{' split' if args.split else ''}",
    }
    result |= {"milliseconds": milliseconds, "spread": spread, "plan": plan, "verify": args.verify}
    result["gb_per_s_a_gpu"] = round(per_gpu / statistics.median(times["sync: sync"]) / 1e9, 1)
    result["copy_gb_per_s"] = copy_rate and round(copy_rate, 1)
    result["extra_memory_mb"] = round(2 * plan["peak_buffer"] / 1e6, 1)
    return result


def answers(session: Session) -> Any:
    config = session.config
    sampling = SamplingParams(config.data.max_response_length, 1.0, 1.0, -1, ())
    session.rollout.submit(session.prompts.next(), config.rollout.n, sampling, 0, config.reward.function)
    return session.rollout.next_batch()


def refresh(session: Session, version: int, found: dict[str, float], sleeps: bool) -> None:
    """What the loop does after a step, its parts timed."""
    start = time.perf_counter()
    if sleeps:
        with timed(found, "wake weights"):
            session.rollout.wake_weights()
    with timed(found, "actor on, sync, actor off"):
        with resident(session.group, "actor", session.config, training=False):
            with timed(found, "sync"):
                parts = session.sync.run(version)
    found |= {name.removeprefix("timing_s/"): seconds for name, seconds in parts.items()}
    with timed(found, "wake KV cache" if sleeps else "flush"):
        session.rollout.resume()
    found["all"] = time.perf_counter() - start


@contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """No other benchmark that was given the same file measures at the same time."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found[name] = time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--gpus", type=int, default=1, help="on one node; without GPUs, processes")
    parser.add_argument("--split", type=int, default=0, metavar="N", help="GPUs of SGLang's own, beside --gpus")
    parser.add_argument("--tensor", type=int, default=1, help="the trainer's tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="the trainer's pipeline-parallel size")
    parser.add_argument("--rollout-tensor", type=int, default=1, help="tensor-parallel size of an SGLang replica")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--verify", choices=("checksum", "bitwise", "off"), default="checksum")
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="of the GPU, for SGLang")
    parser.add_argument("--max-tokens", type=int, default=65536, help="of SGLang's KV cache")
    parser.add_argument("--offload", action="store_true", help="the actor's memory is on the host while SGLang answers")
    parser.add_argument("--lock", help="a file: benchmarks with the same one start together and measure in turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
