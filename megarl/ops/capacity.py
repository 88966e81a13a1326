"""What a GPU of a given size has room for: SGLang's KV cache and the answers in it, and the peak of each phase of a
step. Bytes throughout; what limits decode, and what does not fit, is said in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config import Config
from megarl.ops.memory import EngineMemory, Usage

GPU_SIZES = (80, 141)
"""GB as sold (A100 and H100, H200), counted as 1e9 bytes; the devices have a few per cent more."""

NUM_BUCKETS_HELD = 2
"""Of a weight sync, at a time (reshard/executor.py is double-buffered)."""

TRAINING = {
    "actor": "the actor trains",
    "critic": "the critic trains",
    "reference": "the reference computes",
    "reward_model": "the reward model scores",
}
SYNC = "weights are synced"
GENERATION = "answers are generated"


@dataclass(frozen=True)
class Room:
    """What SGLang's share of one GPU holds."""

    gpu: int
    """GB of the GPU, as in GPU_SIZES."""
    free: int
    """While SGLang starts."""
    share: int
    """memory_fraction of what is free then: SGLang's rule (0.5.21, kv_cache_configurator.py)."""
    kv_cache: int
    """Negative: the share does not hold the weights."""
    tokens: int
    answers: int
    """Answers of data.max_prompt_length + data.max_response_length tokens that fit together, none sharing a prompt's
    cache."""


def room(config: Config, engine: EngineMemory, roles: Usage | None, gpu: int) -> Room:
    """roles: what the trainer keeps on the same GPU; None on GPUs of the engine's own."""
    free = max(gpu * 10**9 - (roles.start if roles else 0), 0)
    share = int(config.rollout.sglang.memory_fraction * free)
    tokens = max(engine.kv_cache(share), 0) // engine.kv_token
    return Room(gpu, free, share, engine.kv_cache(share), tokens, tokens // config.max_length)


def answers_a_replica(config: Config) -> int:
    """Answers that a replica is asked for in a step, at once: also those of rollout.oversample, and the greedy ones
    that the others are compared with."""
    prompts = config.asked_prompts(config.data.prompts_per_step)
    return math.ceil(prompts * (config.rollout.n + config.needs_greedy_baseline) / config.num_replicas)


def together(config: Config, found: Room) -> int:
    """Answers of a replica that run together when all are as long as they may be."""
    return min(answers_a_replica(config), config.rollout.sglang.max_running_requests, found.answers)


def decode_limits(config: Config, engine: EngineMemory, rooms: Sequence[Room]) -> list[str]:
    """What keeps a replica from decoding all of its answers at once, or at full speed, and what to change."""
    own, wanted = config.rollout.sglang, answers_a_replica(config)
    running = min(wanted, own.max_running_requests)
    said = []
    if running < wanted:
        said.append(
            f"of {wanted:,} answers a replica, at most {running:,} run together: raise "
            f"rollout.sglang.max_running_requests"
        )
    for found in rooms:
        on = f"on a GPU of {found.gpu} GB"
        if engine.weights >= found.free:
            instead = "" if config.rollout.num_gpus else ", or offload the roles"
            said.append(
                f"{on} SGLang's weights do not fit into the {found.free / 1e9:.1f} GB that are free: raise "
                f"rollout.tensor{instead}"
            )
        elif found.kv_cache < 0:
            least = math.ceil(100 * engine.weights / found.free) / 100
            said.append(
                f"{on} SGLang's share does not hold its weights: raise rollout.sglang.memory_fraction above "
                f"{least:.2f}, or rollout.tensor"
            )
        elif found.answers < running:
            said.append(
                f"{on} {found.answers:,} of {wanted:,} answers a replica fit into the KV cache at full length: raise "
                f"rollout.sglang.memory_fraction or rollout.tensor"
            )
    most = max(together(config, found) for found in rooms)
    if most > own.cuda_graph_max_batch and not own.eager:
        said.append(
            f"{most:,} answers run together, but batches above {own.cuda_graph_max_batch:,} have no CUDA graph: raise "
            f"rollout.sglang.cuda_graph_max_batch"
        )
    return said


def trainer_peaks(config: Config, roles: Usage, weights: int, share: int, bucket: int) -> dict[str, int]:
    """By phase, what a trainer's GPU holds of roles and engine, without activations.

    Args:
        weights: of the engine on that GPU; 0: it has GPUs of its own.
        share: of SGLang on that GPU while it is awake; of an embedded engine, its weights.
        bucket: the largest of a weight sync.
    """
    sleeps = config.rollout.engine == "sglang" and config.rollout.sleeps
    asleep, waking = (0, weights) if sleeps else (share, share)
    peaks = {TRAINING[role]: held + asleep for role, held in roles.training.items()}
    peaks[SYNC] = roles.sync + waking + NUM_BUCKETS_HELD * bucket
    if config.rollout.num_gpus == 0:
        peaks[GENERATION] = roles.generation + share
    return peaks


def overfull(peaks: Mapping[int, Mapping[str, int]]) -> list[str]:
    """peaks: by GB of a GPU and phase. What does not fit, before any activation has its place, and what to change."""
    changes = {SYNC: "offload more, or raise rollout.tensor", GENERATION: "offload more, or lower the engine's share"}
    return [
        f"on a GPU of {gpu} GB {held / 1e9:.1f} GB do not fit while {phase}: "
        f"{changes.get(phase, 'offload more, or split the roles over more GPUs')}"
        for gpu, phases in peaks.items()
        for phase, held in phases.items()
        if held > gpu * 10**9
    ]
