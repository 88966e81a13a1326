"""Measure whole PPO steps: tokens/s and the seconds of every stage, with random weights and answers of a fixed length.

    tools/bench/step.py configs/recipes/qwen2.5_0.5b_gsm8k_ppo_1x1.yaml --shape qwen2.5-0.5b
    tools/bench/step.py configs/quickstart.yaml --shape tiny --answer 8 --prompt 6 data.prompts_per_step=16

Runs the configuration as `megarl train` does, but with a model of random weights of the shape, prompts of random
characters (log-normal lengths of mean `--prompt` tokens) and every answer forced to `--answer` tokens, so that speed
can be compared with other systems on the same work. Prints the mean seconds of each stage over steps `--first` to
`--steps` and one JSON line. key=value arguments go over the configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from shapes import ALPHABET, SHAPES, write_model

from megarl import config as configuration
from megarl import train
from megarl.data.prompts import Row, write_rows

DIGITS = ALPHABET[:10]


def main() -> int:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model, run = os.path.join(folder, "model"), args.keep or os.path.join(folder, "run")
        write_model(args.shape, model, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        data = str(write_rows(os.path.join(folder, "prompts.parquet"), make_prompts(args.prompt, args.most, 20_000)))
        config = configuration.load(args.config, [*forced(args, model, data, run), *args.overrides])
        start = time.perf_counter()
        status = train.run_training(config)
        if status:
            return status
        seconds = time.perf_counter() - start
        with open(os.path.join(run, "metrics.jsonl")) as file:
            steps = [found for line in file if "timing_s/step" in (found := json.loads(line))]
    report(args, config, steps, seconds)
    return 0


def forced(args: argparse.Namespace, model: str, data: str, run: str) -> list[str]:
    """What the benchmark sets, as overrides."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    return [
        f"run.dir={run}",
        f"run.total_steps={args.steps}",
        "run.validate_every=0",
        "run.validate_before_training=false",
        "run.save_every=0",
        "run.save_at_end=false",
        "run.save_model=false",
        f"model.path={model}",
        "model.create=null",
        "model.tokenizer_path=null",
        f"model.precision={precision}",
        f"data.train=[{data}]",
        "data.validation=[]",
        "data.create=null",
        f"data.max_prompt_length={args.most}",
        f"data.max_response_length={args.answer}",
        "rollout.ignore_eos=true",
    ]


def make_prompts(mean: int, most: int, count: int) -> list[Row]:
    """Prompts of random digits, a token each."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.35**2 / 2, 0.35, count).round(), 1, most).astype(int)
    return [Row("bench", "".join(random.choice(list(DIGITS), n)), "0") for n in lengths]


def report(args: argparse.Namespace, config: Any, steps: list[dict[str, Any]], seconds: float) -> None:
    counted = steps[args.first - 1 : args.steps]
    stages = {name: statistics.mean(s[name] for s in counted) for name in counted[0] if name.startswith("timing_s/")}
    for name, value in sorted(stages.items(), key=lambda item: -item[1]):
        print(f"{name.removeprefix('timing_s/'):28} {value:8.3f} s")
    chosen = ("perf/throughput", "perf/total_num_tokens", "perf/max_memory_allocated_gb", "perf/mfu/actor")
    result: dict[str, Any] = {
        "shape": args.shape,
        "steps": [args.first, args.steps],
        "seconds_in_all": round(seconds, 1),
    }
    result |= {name: statistics.mean(s[name] for s in counted) for name in chosen if name in counted[0]}
    result |= {"stages": {name.removeprefix("timing_s/"): round(value, 4) for name, value in stages.items()}}
    print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a YAML file as for megarl train")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--prompt", type=int, default=105, help="mean tokens of a prompt")
    parser.add_argument("--most", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of every answer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--first", type=int, default=3, help="the first step that counts")
    parser.add_argument("--keep", help="the run's folder; by default it is thrown away")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
