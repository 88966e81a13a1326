"""From a step's rewards, log-probs and values to advantages and returns, for the samples of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.algorithms.advantages import Moments, discounted_returns, gae_packed, token_rewards, whiten
from megarl.algorithms.kl import kl_estimate
from megarl.config import AlgorithmConfig
from megarl.types import FloatArray, Sample


@dataclass(frozen=True)
class StepAdvantages:
    """One array [R] a sample, in the order of the samples; moments are over their loss tokens."""

    advantages: list[FloatArray]
    returns: list[FloatArray] | None
    """gae only: what the critic learns."""
    rewards: FloatArray  # [S], the score less the KL penalty, summed over the answer
    kl: Moments
    """Of the KL to the reference; of nothing where there is none."""
    moments: Moments
    """Of the advantages: added over ranks they whiten everyone's (`whitened`)."""


def step_advantages(
    config: AlgorithmConfig,
    kl_coef: float,
    samples: Sequence[Sample],
    logprobs: Sequence[FloatArray] | None,
    reference_logprobs: Sequence[FloatArray] | None = None,
    values: Sequence[FloatArray] | None = None,
    sample_advantages: Sequence[float] | None = None,
) -> StepAdvantages:
    """Advantages of every sample.

    Args:
        kl_coef: the present weight of the KL penalty in the reward.
        logprobs, reference_logprobs, values: one [R] a sample. Values are needed for gae, log-probs and reference
            log-probs for a KL penalty; without either of them the KL is not known.
        sample_advantages: for the estimators that give all tokens of an answer the same one, each sample's.

    Raises:
        ValueError: gae without values, such an estimator without them, or a KL penalty without log-probs.
    """
    lengths = [len(s.response_ids) for s in samples]
    mask = torch.from_numpy(_joined([s.loss_mask for s in samples], np.bool_))
    penalty, kl = None, Moments(0, 0.0, 0.0)
    if reference_logprobs is not None and logprobs is not None:
        own = torch.from_numpy(_joined(logprobs, np.float32))
        penalty = kl_estimate(config.kl_in_reward_kind, own, torch.from_numpy(_joined(reference_logprobs, np.float32)))
        kl = Moments.of(penalty, mask)
    elif kl_coef != 0:
        raise ValueError(f"a KL penalty of {kl_coef} needs the policy's and the reference's log-probs")
    penalties = [None] * len(samples) if penalty is None or kl_coef == 0 else penalty.split(lengths)
    masks = mask.split(lengths)
    rewards = [token_rewards(s.score, p, m, kl_coef) for s, p, m in zip(samples, penalties, masks, strict=True)]
    totals = np.array([float(r.sum()) for r in rewards], np.float32)

    flat_rewards = torch.cat(rewards) if rewards else torch.zeros(0)
    if config.advantage == "gae":
        if values is None:
            raise ValueError("gae needs the critic's values")
        flat_values = torch.from_numpy(_joined(values, np.float32))
        advantages, returns = gae_packed(flat_rewards, flat_values, mask, lengths, config.gamma, config.lam)
        moments = Moments.of(advantages, mask)
        return StepAdvantages(_cut(advantages, lengths), _cut(returns, lengths), totals, kl, moments)

    if config.advantage == "reinforce_pp":
        advantages = discounted_returns(flat_rewards, mask, lengths, config.gamma)
        return StepAdvantages(_cut(advantages, lengths), None, totals, kl, Moments.of(advantages, mask))

    if sample_advantages is None:
        raise ValueError(f"{config.advantage} needs each sample's advantage")
    numbers = torch.tensor(sample_advantages, dtype=torch.float32).repeat_interleave(
        torch.tensor(lengths, dtype=torch.long)
    )
    advantages = torch.where(mask, numbers, 0.0)
    return StepAdvantages(_cut(advantages, lengths), None, totals, kl, Moments.of(advantages, mask))


def whitened(advantages: Sequence[FloatArray], samples: Sequence[Sample], moments: Moments) -> list[FloatArray]:
    """The advantages with mean 0 and variance 1 by the moments of all ranks."""
    lengths = [len(a) for a in advantages]
    mask = torch.from_numpy(_joined([s.loss_mask for s in samples], np.bool_))
    return _cut(whiten(torch.from_numpy(_joined(advantages, np.float32)), mask, moments), lengths)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)


def _cut(values: torch.Tensor, lengths: Sequence[int]) -> list[FloatArray]:
    return [v.float().numpy() for v in values.split(list(lengths))]
