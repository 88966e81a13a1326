"""The losses of actor and critic, per token. Nothing is reduced: multiply by the weights of aggregation.py and sum.

`POLICY_LOSSES` has the actor's by name. All take (logprobs, old_logprobs, advantages), then options of their own and
importance_weights by name, and give a `PolicyLoss`; with logprobs equal to old_logprobs each one's gradient is that of
-advantages * logprobs.

Where the loss mask is False the results mean nothing, but they are multiplied by a weight of 0, and 0 x NaN is NaN, in
the gradient too: give finite numbers there (0 will do), or select the loss tokens first. The entropy bonus needs no
function: it is a per-token tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The log of the probability ratio is clamped to +-20 before the exponential, as in verl; beyond, the gradient is 0."""


class PolicyLoss(NamedTuple):
    """All [T]; only `loss` carries a gradient. Means over loss tokens of the others are verl's metrics, named here."""

    loss: Tensor
    clipped: Tensor
    """bool: the clip is what counts. ppo and gspo have no gradient there, cispo has one of clipped weight; sapo and gpg
    clip nothing. Its mean is actor/pg_clipfrac."""
    clipped_low: Tensor
    """bool: ppo's dual clip is active. Its mean is actor/pg_clipfrac_lower."""
    kl: Tensor
    """old - new log-probability, clamped to +-20: the k1 estimate of KL(old || new). Its mean is actor/ppo_kl."""
    ratio: Tensor
    """new / old probability, of the clamped log ratio; gspo's is that of the whole sequence."""


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
    _check_clips(clip_low, clip_high)
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
    return PolicyLoss(_weighted(loss, importance_weights), clipped, clipped_low, -log_ratio.detach(), ratio.detach())


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_log_ratio: Tensor,
    clip_low: float,
    clip_high: float,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate of a whole sequence's ratio, of which each token carries its share of the gradient.

        s_i    = exp(mean over the n_i loss tokens of sequence i of logprobs - old_logprobs)
        s_i,t  = sg[s_i] * exp(logprobs - sg[logprobs])             (sg: no gradient; the value is s_i)
        loss   = max(-A * s_i,t, -A * clip(s_i,t, 1 - clip_low, 1 + clip_high))
        loss   = importance_weights * loss                          if given

    Group Sequence Policy Optimization (arXiv 2507.18071), in its form for tokens, GSPO-token. Averaged over a
    sequence's tokens (aggregation seq-mean-token-mean, the paper's) it has the value and the gradient of equation 5
    where A is the same for all of them. A mean of log ratios moves far less than one of them: the paper clips at 3e-4
    below and 4e-4 above; ppo's 0.2 would clip nothing.

    Args:
        logprobs, old_logprobs, advantages: [T], as for `policy_loss`.
        sequence_log_ratio: [T] constants, log s_i at each token of sequence i. It is given, because the tokens of a
            sequence may lie on several ranks.

    Raises:
        ValueError: shapes that differ; a clip below 0; a clip_low above 1.

    >>> new, old = torch.tensor([-1.0, -1.5]), torch.tensor([-1.25, -1.25])
    >>> gspo_loss(new, old, torch.ones(2), (new - old).mean().expand(2), clip_low=3e-4, clip_high=4e-4).loss
    tensor([-1., -1.])
    """
    _check_shapes(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        sequence_log_ratio=sequence_log_ratio,
        importance_weights=importance_weights,
    )
    _check_clips(clip_low, clip_high)
    advantages = advantages.detach()

    log_ratio = (logprobs - logprobs.detach()) + sequence_log_ratio.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = _weighted(torch.maximum(unclipped_loss, clipped_loss), importance_weights)
    return PolicyLoss(
        loss, clipped_loss > unclipped_loss, _nowhere(logprobs), _kl(logprobs, old_logprobs), ratio.detach()
    )


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight: no token is left without a gradient.

        loss = -sg[clip(exp(logprobs - old_logprobs), 1 - clip_low, 1 + clip_high)] * A * logprobs
        loss = importance_weights * loss                            if given

    MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, which bounds the weight from above only: clip_low 1.

    Args:
        logprobs, old_logprobs, advantages: [T], as for `policy_loss`.

    Raises:
        ValueError: shapes that differ; a clip below 0; a clip_low above 1.

    >>> new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])  # ratios 1 and e
    >>> cispo_loss(new, old, torch.tensor([2.0, 2.0]), clip_low=1.0, clip_high=0.5).loss
    tensor([2., 3.])
    """
    _check_shapes(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, importance_weights=importance_weights
    )
    _check_clips(clip_low, clip_high)

    kl = _kl(logprobs, old_logprobs)
    ratio = (-kl).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = _weighted(-weight * advantages.detach() * logprobs, importance_weights)
    return PolicyLoss(loss, weight != ratio, _nowhere(logprobs), kl, ratio)


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_positive: float,
    tau_negative: float,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """A soft gate in place of the clip: the gradient fades as the ratio leaves 1, sooner where tau is larger.

        ratio = exp(clamp(logprobs - old_logprobs, -20, 20))
        loss  = -A * 4 / tau * sigmoid(tau * (ratio - 1))           tau_positive where A > 0, else tau_negative
        loss  = importance_weights * loss                           if given

    Its gradient is -A * ratio * 4 p (1 - p) * grad logprobs with p = sigmoid(tau * (ratio - 1)): weight 1 at ratio 1.
    Soft Adaptive Policy Optimization (arXiv 2511.20347), which averages by seq-mean-token-mean.

    Args:
        logprobs, old_logprobs, advantages: [T], as for `policy_loss`.
        tau_positive, tau_negative: the paper's are 1.0 and 1.05: what a negative advantage pushes away fades sooner.

    Raises:
        ValueError: shapes that differ; a tau that is not above 0.

    >>> sapo_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]), 1.0, 2.0).loss  # -4 / 1 / 2, 4 / 2 / 2
    tensor([-2.,  1.])
    """
    _check_shapes(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, importance_weights=importance_weights
    )
    if not (tau_positive > 0.0 and tau_negative > 0.0):
        raise ValueError(
            f"need tau_positive and tau_negative above 0, got tau_positive={tau_positive}, tau_negative={tau_negative}"
        )
    advantages = advantages.detach()

    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = _weighted(-advantages * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)), importance_weights)
    return PolicyLoss(loss, _nowhere(logprobs), _nowhere(logprobs), -log_ratio.detach(), ratio.detach())


def gpg_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, importance_weights: Tensor | None = None
) -> PolicyLoss:
    """The plain policy gradient: no ratio, no clip, no trust region.

        loss = -A * logprobs
        loss = importance_weights * loss                            if given

    GPG (arXiv 2504.02546). Nothing corrects for old_logprobs that differ, which is the case from the second
    optimizer step on the same samples; they serve for the metrics only.

    Args:
        logprobs, old_logprobs, advantages: [T], as for `policy_loss`.

    Raises:
        ValueError: shapes that differ.

    >>> gpg_loss(torch.tensor([-1.0, -0.5]), torch.tensor([-1.0, -1.0]), torch.tensor([2.0, -1.0])).loss
    tensor([ 2.0000, -0.5000])
    """
    _check_shapes(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, importance_weights=importance_weights
    )
    kl = _kl(logprobs, old_logprobs)
    loss = _weighted(-advantages.detach() * logprobs, importance_weights)
    return PolicyLoss(loss, _nowhere(logprobs), _nowhere(logprobs), kl, (-kl).exp())


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": policy_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gpg": gpg_loss,
}


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


def _weighted(loss: Tensor, importance_weights: Tensor | None) -> Tensor:
    return loss if importance_weights is None else importance_weights.detach() * loss


def _kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """As in `PolicyLoss`."""
    return (old_logprobs - logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _check_clips(clip_low: float, clip_high: float) -> None:
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0, got clip_low={clip_low}, clip_high={clip_high}")


def _check_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
