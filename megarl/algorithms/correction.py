"""The rollout engine's log-probs are not the trainer's: factors on the policy loss that make up for it, or leave out
what no factor can.

The trust region of a policy loss is around the trainer's old log-probs, but the tokens were drawn by the rollout engine
(other kernels, another precision, perhaps older weights). Everything here starts from

    log_ratio = old_logprobs - rollout_logprobs                     [T], log of trainer / rollout

of the packed responses of several sequences, `lengths` long, and is a constant to the optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import Moments
from megarl.config import CorrectionConfig
from megarl.types import FloatArray, Sample

MAX_LOG_RATIO = 20.0
"""Clamp of the log of a ratio before the exponential, as in verl."""


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum of each sequence's values: [T] to [S].

    Raises:
        ValueError: lengths that do not add up to T.

    >>> sequence_sums(torch.tensor([1.0, 2.0, 4.0]), [2, 1])
    tensor([3., 4.])
    """
    if sum(lengths) != len(values):
        raise ValueError(f"lengths add up to {sum(lengths)}, but there are {len(values)} tokens")
    return values.new_zeros(len(lengths)).index_add(0, at_tokens(torch.arange(len(lengths)), lengths), values)


def at_tokens(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each sequence's value at all its tokens: [S] to [T].

    >>> at_tokens(torch.tensor([3.0, 4.0]), [2, 1])
    tensor([3., 3., 4.])
    """
    return values.repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    level: str,
    max_weight: float,
    min_weight: float | None = None,
) -> Tensor:
    """The ratio of each token, or of its whole sequence, kept within bounds.

        w = exp(log_ratio)                                  level "token"
        w = exp(sum of log_ratio over the sequence)         level "sequence": the product of its tokens' ratios
        w = min(w, max_weight)                              truncated
        w = w if min_weight <= w <= max_weight else 0       IcePop, with min_weight

    Truncated Importance Sampling (Ionides, 2008), brought here by Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training (https://fengyao.notion.site/off-policy-rl); whole sequences: When Speed Kills Stability
    (https://richardli.xyz/rl-collapse); IcePop: Every Step Evolves (arXiv 2510.18855). Usual bounds are 2, and 0.5 to 5
    for IcePop.

    Args:
        mask: [T] bool; the others neither count nor weigh anything.

    Returns:
        [T], 0 where the mask is False.

    Raises:
        ValueError: an unknown level; lengths that do not add up to T.

    >>> log_ratio, mask = torch.tensor([4.0, 0.5, 1.0]).log(), torch.tensor([True, True, True])
    >>> importance_weights(log_ratio, mask, [2, 1], "token", max_weight=2.0)
    tensor([2.0000, 0.5000, 1.0000])
    >>> importance_weights(log_ratio, mask, [2, 1], "sequence", max_weight=3.0)  # 4 * 0.5 = 2
    tensor([2., 2., 1.])
    >>> importance_weights(log_ratio, mask, [2, 1], "token", max_weight=3.0, min_weight=0.25)
    tensor([0.0000, 0.5000, 1.0000])
    """
    weights = _ratios(log_ratio, mask, lengths, level)
    if min_weight is None:
        weights = weights.clamp(max=max_weight)
    else:
        weights = torch.where((weights >= min_weight) & (weights <= max_weight), weights, 0.0)
    return torch.where(mask, weights, 0.0)


def _ratios(log_ratio: Tensor, mask: Tensor, lengths: Sequence[int], level: str) -> Tensor:
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level of importance weights {level!r}: use token or sequence")
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    if level == "sequence":
        log_ratio = at_tokens(sequence_sums(log_ratio, lengths), lengths)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""Schulman's estimates of KL(rollout || trainer) (see kl.py), k1 with the sign turned: it is the log of the ratio."""


def kept(
    log_ratio: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    level: str,
    kind: str,
    above: float,
    below: float | None = None,
) -> Tensor:
    """Which tokens stay: those whose divergence is within bounds, or whose whole sequence's is.

        d = log_ratio (k1), log_ratio^2 / 2 (k2), exp(log_ratio) - 1 - log_ratio (k3)
        level "token": d; "seq_sum", "seq_mean": its sum, mean over the sequence's loss tokens; "seq_max": each of them
        kept where log(below) <= d <= log(above)            k1: bounds of a ratio; below is 1 / above unless given
        kept where d <= above                               k2, k3

    Masked importance sampling and rejection of sequences: When Speed Kills Stability
    (https://richardli.xyz/rl-collapse). verl's rollout_rs has the same, but bounds rollout / trainer in k1.

    Args:
        mask: [T] bool; the others do not count.

    Returns:
        [T] bool, False where the mask is.

    Raises:
        ValueError: an unknown level or kind; lengths that do not add up to T.

    >>> log_ratio, mask = torch.tensor([4.0, 0.25, 1.0]).log(), torch.tensor([True, True, True])
    >>> kept(log_ratio, mask, [2, 1], "token", "k1", above=2.0)
    tensor([False, False,  True])
    >>> kept(log_ratio, mask, [2, 1], "seq_sum", "k1", above=2.0)  # 4 * 0.25 = 1
    tensor([True, True, True])
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"unknown divergence {kind!r}: use one of {', '.join(DIVERGENCES)}")
    if level not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise ValueError(f"unknown level of rejection {level!r}: use token, seq_sum, seq_mean or seq_max")
    divergence = DIVERGENCES[kind](torch.where(mask, log_ratio.detach(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    lowest, highest = (math.log(below or 1.0 / above), math.log(above)) if kind == "k1" else (-math.inf, above)
    if level in ("seq_sum", "seq_mean"):
        sums = sequence_sums(divergence, lengths)
        counts = sequence_sums(mask.to(sums.dtype), lengths).clamp(min=1.0)
        divergence = at_tokens(sums if level == "seq_sum" else sums / counts, lengths)
    stays = (divergence >= lowest) & (divergence <= highest)
    if level == "seq_max":
        stays = at_tokens(sequence_sums((mask & ~stays).float(), lengths) == 0, lengths)
    return stays & mask


@dataclass(frozen=True)
class CorrectionFigures:
    """What is watched, by name, as sums that ranks add: means over tokens or sequences, largest, smallest."""

    means: Mapping[str, Moments]
    largest: Mapping[str, float] = field(default_factory=dict)
    smallest: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: CorrectionFigures) -> CorrectionFigures:
        return CorrectionFigures(
            {name: moments + other.means[name] for name, moments in self.means.items()},
            {name: max(value, other.largest[name]) for name, value in self.largest.items()},
            {name: min(value, other.smallest[name]) for name, value in self.smallest.items()},
        )

    def metrics(self) -> dict[str, float]:
        """rollout_corr/*, named as in verl."""
        found = {name: moments.mean for name, moments in self.means.items()} | {**self.largest, **self.smallest}
        for name in ("chi2_token", "chi2_seq"):
            found[name] -= 1.0
        if "rollout_is_mean" in self.means:
            weights = self.means["rollout_is_mean"]
            squares = weights.total_of_squares / max(weights.count, 1)
            found["rollout_is_std"] = weights.std
            found["rollout_is_eff_sample_size"] = weights.mean**2 / squares if squares else 0.0
        return {f"rollout_corr/{name}": value for name, value in found.items()}


def divergence_figures(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, lengths: Sequence[int]
) -> CorrectionFigures:
    """How far apart rollout and trainer are. r is the ratio trainer / rollout, of a token or (product) a sequence.

        kl = mean(-log r)       k3_kl = mean(r - 1 - log r)     chi2_token, chi2_seq = mean(r^2) - 1
        training_ppl, rollout_ppl: exp(-mean log-prob) of a sequence, then the mean over sequences; ppl_ratio: of their
        quotient; log_ppl_diff (and abs, max, min): of its logarithm

    Over loss tokens, and over sequences that have any.
    """
    own, rollout = (torch.where(mask, x.detach().double(), 0.0) for x in (logprobs, rollout_logprobs))
    log_ratio = (own - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_token = {
        "kl": -log_ratio,
        "k3_kl": torch.expm1(log_ratio) - log_ratio,
        "chi2_token": (2.0 * log_ratio).exp(),
    }
    counts = sequence_sums(mask.double(), lengths)
    counted = counts > 0
    mean_own, mean_rollout = (sequence_sums(x, lengths) / counts.clamp(min=1.0) for x in (own, rollout))
    difference = mean_rollout - mean_own
    total = (-difference * counts).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_sequence = {
        "training_ppl": (-mean_own).exp(),
        "rollout_ppl": (-mean_rollout).exp(),
        "ppl_ratio": difference.exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "chi2_seq": (2.0 * total).exp(),
    }
    means = {name: Moments.of(values, mask) for name, values in per_token.items()}
    means |= {name: Moments.of(values, counted) for name, values in per_sequence.items()}
    return CorrectionFigures(
        means,
        {"log_ppl_diff_max": _largest(difference[counted])},
        {"log_ppl_diff_min": -_largest(-difference[counted])},
    )


def step_correction(
    config: CorrectionConfig, samples: Sequence[Sample], logprobs: Sequence[FloatArray]
) -> tuple[list[FloatArray], CorrectionFigures]:
    """The factor on the policy loss of every token of the samples of one rank, and what is watched.

    Args:
        logprobs: the trainer's, before the update: [R] of each sample.

    Returns:
        One array [R] a sample: its importance weights (1 without them), 0 where a token is rejected or has no loss.
    """
    lengths = [len(s.response_ids) for s in samples]
    mask = _joined([s.loss_mask for s in samples], torch.bool)
    own = _joined(logprobs, torch.float32)
    rollout = _joined([s.rollout_logprobs for s in samples], torch.float32)
    log_ratio = own - rollout
    factors = mask.to(torch.float32)
    figures = divergence_figures(own, rollout, mask, lengths)
    means, largest, smallest = dict(figures.means), dict(figures.largest), dict(figures.smallest)
    if config.weights != "none":
        factors = importance_weights(log_ratio, mask, lengths, config.weights, config.max_weight, config.min_weight)
        raw = _ratios(log_ratio, mask, lengths, config.weights)
        low = 1.0 / config.max_weight if config.min_weight is None else config.min_weight
        means["rollout_is_mean"] = Moments.of(factors, mask)
        means["rollout_is_ratio_fraction_high"] = Moments.of((raw > config.max_weight).float(), mask)
        means["rollout_is_ratio_fraction_low"] = Moments.of((raw < low).float(), mask)
        largest["rollout_is_max"] = _largest(raw[mask])
        smallest["rollout_is_min"] = -_largest(-raw[mask])
    if config.reject != "none":
        assert config.reject_above is not None, "the config is validated"
        bounds = config.reject_above, config.reject_below
        stays = kept(log_ratio, mask, lengths, config.reject, config.reject_kind, *bounds)
        factors = torch.where(stays, factors, 0.0)
        rejected = (mask & ~stays).float()
        counted = sequence_sums(mask.float(), lengths) > 0
        means["rollout_rs_masked_fraction"] = Moments.of(rejected, mask)
        means["rollout_rs_seq_masked_fraction"] = Moments.of((sequence_sums(rejected, lengths) > 0).float(), counted)
    return [f.numpy() for f in factors.split(lengths)], CorrectionFigures(means, largest, smallest)


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else -math.inf


def _joined(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.as_tensor(a).to(dtype) for a in arrays]) if arrays else torch.zeros(0, dtype=dtype)
