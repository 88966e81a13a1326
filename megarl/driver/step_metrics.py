"""A step's metrics from what the driver knows: lengths, scores, seconds, memory. Names as in verl, so that figures
compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config import Config
from megarl.driver.rollout import RolloutBatch
from megarl.engines.flops import train_flops, train_flops_verl
from megarl.metrics import length_metrics
from megarl.rewards import is_timeout

PER_TOKEN_STAGES = {
    "gen": "response",
    "ref": "all",
    "values": "all",
    "adv": "all",
    "update_critic": "all",
    "update_actor": "all",
}
"""Stages whose time is also given in ms a token, and which tokens count."""


@dataclass(frozen=True)
class Flops:
    """What MFU needs: the models' shapes and the peak of one GPU (FLOP/s; None: no MFU is given)."""

    actor: Any
    critic: Any
    peak: float | None


def step_metrics(
    config: Config, batch: RolloutBatch, seconds: Mapping[str, float], flops: Flops, memory: Mapping[str, float]
) -> dict[str, float]:
    """perf/*, timing_s/*, timing_per_token_ms/*, lengths, and how many rewards failed (of these, timed out).

    Answers are scored while others are generated: timing_s/reward is what scoring took after the last one had ended,
    and timing_s/gen is without it. perf/throughput is in tokens per second and GPU, prompt and response tokens counted.
    """
    responses = [info.response_length for info in batch.infos]
    prompts = [info.prompt_length for info in batch.infos]
    if "gen" in seconds:
        reward = min(batch.reward_seconds, seconds["gen"])
        seconds = {**seconds, "gen": seconds["gen"] - reward, "reward": reward}
    tokens = {"all": batch.num_tokens, "response": sum(responses)}
    ranks, total = config.cluster.num_ranks, seconds["step"]
    metrics = {
        **length_metrics("response_length", responses, config.data.max_response_length),
        **length_metrics("prompt_length", prompts, config.data.max_prompt_length),
        # Also where there was no room for another turn.
        "response_length/clip_ratio": float(np.mean([info.finish_reason == "length" for info in batch.infos])),
        "response_length/aborted_ratio": float(np.mean([info.finish_reason == "abort" for info in batch.infos])),
        **_rollout_metrics(batch, seconds),
        "perf/total_num_tokens": float(batch.num_tokens),
        "perf/time_per_step": total,
        "perf/throughput": batch.num_tokens / (total * ranks),
        "reward/failed": float(sum(info.reward_error is not None for info in batch.infos)),
        "reward/overlong_penalty": float(np.mean([info.penalty for info in batch.infos])),
        "reward/timed_out": float(sum(is_timeout(info.reward_error) for info in batch.infos)),
        **{f"perf/{name}": value for name, value in memory.items()},
        **{f"timing_s/{stage}": value for stage, value in seconds.items()},
    }
    for stage, which in PER_TOKEN_STAGES.items():
        if stage in seconds:
            metrics[f"timing_per_token_ms/{stage}"] = 1e3 * seconds[stage] / max(tokens[which], 1)
    return metrics | _mfu(config, batch.lengths, seconds, flops)


def _mfu(config: Config, lengths: Sequence[int], seconds: Mapping[str, float], flops: Flops) -> dict[str, float]:
    if flops.peak is None:
        return {}
    metrics = {}
    for role, shape, epochs, outputs in (
        ("actor", flops.actor, config.actor.batch.epochs, flops.actor.vocab_size),
        ("critic", flops.critic, config.critic.batch.epochs, 1),
    ):
        if f"update_{role}" in seconds:
            available = seconds[f"update_{role}"] * flops.peak * config.cluster.num_ranks
            metrics[f"perf/mfu/{role}"] = epochs * train_flops(shape, lengths, outputs) / available
            if role == "actor":
                metrics["perf/mfu_verl/actor"] = epochs * train_flops_verl(shape, lengths) / available
    return metrics


def _rollout_metrics(batch: RolloutBatch, seconds: Mapping[str, float]) -> dict[str, float]:
    """How generation went: RolloutFigures. rollout/tokens_per_s counts response tokens, over all replicas; running and
    waiting are answers of one replica."""
    figures, activity = batch.figures, batch.figures.activity
    metrics = {
        "rollout/cache_hit_rate": figures.cache_hit_rate,
        "rollout/idle_share": figures.idle_share,
        "rollout/tail_share": figures.tail_share,
    }
    if seconds.get("gen"):
        metrics["rollout/tokens_per_s"] = sum(info.response_length for info in batch.infos) / seconds["gen"]
    if activity.num_looks:
        metrics |= {
            "rollout/running_mean": activity.num_running,
            "rollout/running_max": activity.max_running,
            "rollout/waiting_mean": activity.num_waiting,
            "rollout/waiting_max": activity.max_waiting,
            "rollout/kv_cache_use_max": activity.max_cache_use,
        }
    return metrics


def validation_metrics(batch: RolloutBatch, n: int) -> dict[str, float]:
    """val-core/<source>/reward/mean@n, best@n where n > 1, val-aux: std@n (over a prompt's answers, divided by n as in
    verl) and the mean over all data."""
    scores = np.array(batch.scores, np.float64).reshape(-1, n)
    sources = np.array([batch.infos[group[0]].data_source for group in batch.groups])
    metrics = {"val-aux/all/reward/mean": float(scores.mean())}
    for source in sorted(set(sources)):
        own = scores[sources == source]
        metrics[f"val-core/{source}/reward/mean@{n}"] = float(own.mean())
        if n > 1:
            metrics[f"val-core/{source}/reward/best@{n}"] = float(own.max(1).mean())
            metrics[f"val-aux/{source}/reward/std@{n}"] = float(own.std(1).mean())
    lengths = [info.response_length for info in batch.infos]
    metrics["val-aux/all/response_length/mean"] = float(np.mean(lengths))
    return metrics
