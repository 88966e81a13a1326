"""What is watched beside the losses, as sums that ranks can add before anything is divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import Moments


def explained_variance(returns: Moments, residuals: Moments, eps: float = 1e-5) -> float:
    """How much of the returns' variance the critic explains (critic/vf_explained_var).

        1 - var(returns - values) / (var(returns) + eps)

    1 is perfect, 0 no better than a constant, below 0 worse than one. eps is verl's.

    Args:
        returns: moments of the returns over the loss tokens of all ranks.
        residuals: moments of returns - values over the same tokens.

    Returns:
        NaN for fewer than two tokens.

    Raises:
        ValueError: counts that differ.

    >>> round(explained_variance(Moments(2, 2.0, 4.0), Moments(2, 1.0, 1.0)), 4)  # variances 2 and 0.5
    0.75
    """
    if returns.count != residuals.count:
        raise ValueError(
            f"moments of {returns.count} returns but of {residuals.count} residuals: use the same tokens for both"
        )
    if returns.count < 2:
        return float("nan")
    return 1.0 - residuals.variance / (returns.variance + eps)


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer's probabilities lie from the rollout engine's: training/rollout_probs_diff_{mean,std,max}.

    Adding two gives the mismatch of both sets of tokens. Over ranks, reduce the moments with a sum and `max` with a
    maximum.

    >>> (Mismatch(Moments(1, 0.5, 0.25), 0.5) + Mismatch(Moments(1, 0.25, 0.0625), 0.25)).mean
    0.375
    """

    moments: Moments
    """Of |p_rollout - p_trainer|."""
    max: float

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.moments + other.moments, max(self.max, other.max))

    @property
    def mean(self) -> float:
        return self.moments.mean

    @property
    def std(self) -> float:
        """Unbiased, as verl's torch.std."""
        return self.moments.std


def mismatch(rollout_logprobs: Tensor, logprobs: Tensor, mask: Tensor) -> Mismatch:
    """|exp(rollout_logprobs) - exp(logprobs)| where the mask is True: of probabilities, not their logarithms, as in
    verl.

    Both must be at the sampling temperature; they are compared in float32 at the least.

    Args:
        rollout_logprobs, logprobs: [T]. mask: [T] bool.

    Returns:
        For no token at all, a mismatch of 0 over 0 tokens.

    Raises:
        ValueError: shapes that differ; a mask that is not bool.

    >>> rollout, trainer = torch.tensor([0.5, 1.0, 0.1]), torch.tensor([0.25, 1.0, 0.9])
    >>> mismatch(rollout.log(), trainer.log(), torch.tensor([True, True, False]))
    Mismatch(moments=Moments(count=2, total=0.25, total_of_squares=0.0625), max=0.25)
    """
    if rollout_logprobs.shape != logprobs.shape:
        raise ValueError(
            f"rollout_logprobs {tuple(rollout_logprobs.shape)} and logprobs {tuple(logprobs.shape)} differ in shape"
        )
    dtype = torch.promote_types(torch.promote_types(rollout_logprobs.dtype, logprobs.dtype), torch.float32)
    difference = (rollout_logprobs.detach().to(dtype).exp() - logprobs.detach().to(dtype).exp()).abs()
    moments = Moments.of(difference, mask)
    return Mismatch(moments, float(difference[mask].max()) if moments.count else 0.0)
