"""When the trainer and the rollout engine disagree about probabilities: a warning, with what is likely to cause it."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import Config


def drift_warning(config: Config, metrics: Mapping[str, float], warned_at: float) -> tuple[str | None, float]:
    """What to say of a step's training/rollout_probs_diff_mean: over sampled tokens, the mean |p trainer - p rollout|.

    Args:
        warned_at: the mean of the last warning, 0 before: the next one comes when it has doubled.

    Returns:
        the warning, if there is one, and the new warned_at.
    """
    found, most = metrics.get("training/rollout_probs_diff_mean"), config.rollout.warn_probs_diff
    if found is None or not most or found < max(most, 2 * warned_at):
        return None, warned_at
    return (
        f"warning: the trainer's probability of a sampled token and the rollout engine's differ by {found:.4f} in the "
        f"mean, at most {metrics['training/rollout_probs_diff_max']:.3f} (rollout.warn_probs_diff = {most:g}); "
        f"{'; '.join(likely_causes(config))}",
        found,
    )


def likely_causes(config: Config) -> list[str]:
    """What in a configuration makes them differ, the likeliest first, then what helps in any case."""
    own, causes = config.rollout, []
    if own.engine == "sglang":
        if own.sglang.kv_cache_dtype.startswith("fp8"):
            causes.append(f"rollout.sglang.kv_cache_dtype {own.sglang.kv_cache_dtype} rounds keys and values: try auto")
        if config.sync.verify == "off":
            causes.append("sync.verify is off: set it to checksum and see whether the weights arrive")
        if own.sglang.attention_backend is not None:
            causes.append(f"rollout.sglang.attention_backend is {own.sglang.attention_backend}: try null")
        if own.sglang.options:
            causes.append(f"rollout.sglang.options sets {', '.join(own.sglang.options)}: try without")
        if config.model.precision == "bf16":
            causes.append("in bf16 other kernels round otherwise, and experts may be chosen otherwise")
    if config.algorithm.correction.is_on:
        causes.append("algorithm.correction makes up for it: watch what it weighs and rejects")
    else:
        causes.append("algorithm.correction.weights: token makes up for it in the policy loss")
    return causes
