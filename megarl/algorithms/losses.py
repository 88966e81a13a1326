"""The losses of actor and critic, per token. Nothing is reduced: multiply by the weights of aggregation.py and sum.

Where the loss mask is False the results mean nothing, but they are multiplied by a weight of 0, and 0 x NaN is NaN, in
the gradient too: give finite numbers there (0 will do), or select the loss tokens first. The entropy bonus needs no
function: it is a per-token tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The log of the probability ratio is clamped to +-20 before the exponential, as in verl; beyond, the gradient is 0."""


class PolicyLoss(NamedTuple):
    """All [T]; only `loss` carries a gradient. Means over loss tokens of the others are verl's metrics, named here."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped surrogate is the one that counts, so that the gradient is 0. Its mean is actor/pg_clipfrac."""
    clipped_low: Tensor
    """bool: the dual clip is active. Its mean is actor/pg_clipfrac_lower."""
    kl: Tensor
    """old - new log-probability, clamped to +-20: the k1 estimate of KL(old || new). Its mean is actor/ppo_kl."""
    ratio: Tensor
    """new / old probability, of the clamped log ratio."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated, with separate clips below and above and an optional dual clip.

        ratio = exp(clamp(logprobs - old_logprobs, -20, 20))
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip)                        where A < 0, unless dual_clip is None
        loss  = importance_weights * loss                        if given

    Proximal Policy Optimization Algorithms (arXiv 1707.06347), equation 7; a higher upper clip: DAPO (arXiv
    2503.14476); dual clip: Mastering Complex Control in MOBA Games with Deep Reinforcement Learning (arXiv
    1912.09729), which bounds the loss of a token with a negative advantage whose ratio has grown large.

    Args:
        logprobs: [T] of the policy being trained; gradient flows through it alone.
        old_logprobs: [T] of the policy that defines the trust region.
        advantages: [T].
        clip_low, clip_high: 0.2 both in verl's defaults.
        dual_clip: 3.0 in verl's defaults; None for none.
        importance_weights: [T] constants that correct for tokens sampled by another policy (old / rollout probability,
            truncated).

    Raises:
        ValueError: shapes that differ; a clip below 0; a clip_low above 1; a dual_clip that is not above 1.

    >>> ratio, advantages = torch.tensor([1.0, 4.0, 4.0]), torch.tensor([2.0, 2.0, -2.0])
    >>> loss = policy_loss(ratio.log(), torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    >>> loss.loss  # -2 * 1; clipped: -2 * 1.2; dual clip: min(2 * 4, 2 * 3)
    tensor([-2.0000, -2.4000,  6.0000])
    >>> loss.clipped, loss.clipped_low
    (tensor([False,  True, False]), tensor([False, False,  True]))
    """
    _check_shapes(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, importance_weights=importance_weights
    )
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0, got clip_low={clip_low}, clip_high={clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip bounds ratios above 1, so it must be above 1 (or None), got {dual_clip}")
    advantages = advantages.detach()

    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = clipped_loss > unclipped_loss
    loss = torch.maximum(unclipped_loss, clipped_loss)
    if dual_clip is None:
        clipped_low = torch.zeros_like(clipped)
    else:
        bound = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > bound)
        loss = torch.where(clipped_low, bound, loss)
    if importance_weights is not None:
        loss = importance_weights.detach() * loss
    return PolicyLoss(loss, clipped, clipped_low, -log_ratio.detach(), ratio.detach())


class ValueLoss(NamedTuple):
    """Both [T]; only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped error is the larger, so that the gradient is 0. Its mean over loss tokens is
    critic/vf_clipfrac."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error of the values, or of the values clipped to +-clip around the old ones if that is larger.

        loss = 0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    The clipping is described in Implementation Matters in Deep Policy Gradients (arXiv 2005.12729), section 3. verl's
    default clip is 0.5.

    Args:
        values: [T] predicted now; gradient flows through it alone.
        old_values: [T] predicted before the update; used only with a clip.
        returns: [T].
        clip: None for the plain squared error.

    Raises:
        ValueError: shapes that differ; a clip that is not above 0.

    >>> value_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([3.0, 2.0]), clip=0.5)
    ValueLoss(loss=tensor([2.0000, 1.1250]), clipped=tensor([False,  True]))
    """
    _check_shapes(values=values, old_values=old_values, returns=returns)
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be above 0 (or None), got {clip}")
    old_values, returns = old_values.detach(), returns.detach()

    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    clipped_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(error, clipped_error), clipped_error > error)


def _check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
