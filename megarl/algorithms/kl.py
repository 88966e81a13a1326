"""KL divergence from the reference policy: per-token estimates, and what sets its coefficient.

The estimators are Schulman's, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html): with x sampled
from the policy p and reference q, each estimates KL(p || q) = E_p[log p(x) - log q(x)] from the two log-probabilities
of the sampled token alone. They share one signature, `(logprobs, reference_logprobs) -> Tensor` of the same shape, and
gradient flows through `logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""k3 clamps log(q/p) to +-20 before it takes the exponential, as verl does."""
MAX_K3 = 10.0
"""k3 clamps its result to +-10, as verl does."""


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative. The usual penalty in the reward.

    As a loss it teaches nothing: its gradient, grad log p, has expectation 0 under p, whatever q is.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.5000])
    """
    return logprobs - reference_logprobs


def absolute(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """|log p - log q|: biased, never negative.

    >>> absolute(torch.tensor([-1.5]), torch.tensor([-1.0]))
    tensor([0.5000])
    """
    return (logprobs - reference_logprobs).abs()


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance, never negative; its gradient is an unbiased estimate of KL's.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1250])
    """
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative; verl's low_var_kl.

    DeepSeekMath (arXiv 2402.03300), equation 4. As in verl, log(q/p) is clamped to +-20 and the result to +-10. The
    gradient is 0 where 10 is reached, with log(q/p) above 2.61 or below -11: a token so far away no longer pulls, and
    the estimate is biased there.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))  # exp(-0.5) - 1 + 0.5
    tensor([0.1065])
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where rounding would also make it negative.
    return (torch.expm1(log_ratio) - log_ratio).clamp(-MAX_K3, MAX_K3)


KLEstimator = Callable[[Tensor, Tensor], Tensor]


def with_gradient_of_k2(estimator: KLEstimator) -> KLEstimator:
    """The value of `estimator` with the gradient of `k2` (straight through), (log p - log q) * grad log p.

    k1 and k3 are unbiased, but their gradients do not estimate that of the KL: k1's has expectation 0, k3's is that of
    KL(q || p). k2's does, so that "k1+" and "k3+" (verl's names) report one and descend the other. The clamps of k3
    bound the value alone.

    >>> logprobs = torch.tensor([-1.0], requires_grad=True)
    >>> estimate = with_gradient_of_k2(k1)(logprobs, torch.tensor([-1.5]))
    >>> estimate.backward()
    >>> estimate.detach(), logprobs.grad  # k1's own gradient is 1
    (tensor([0.5000]), tensor([0.5000]))
    """

    def straight_through(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
        slope = k2(logprobs, reference_logprobs)
        return estimator(logprobs, reference_logprobs).detach() + (slope - slope.detach())

    return straight_through


KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
}

VERL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's second names for the same estimators, for error messages and the reading of its configurations."""


def kl_estimate(kind: str, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimator named `kind`, one of `KL_ESTIMATORS`, token by token.

    Args:
        logprobs: [T] log-probabilities of the sampled tokens under the policy; gradient flows through it.
        reference_logprobs: [T] the same under the reference; a constant.

    Returns:
        [T], of which only positions with a loss mask mean anything.

    Raises:
        ValueError: unknown kind; shapes that differ.

    >>> kl_estimate("k1", torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([ 0.5000, -1.0000])
    """
    if kind not in KL_ESTIMATORS:
        here = f" (verl's {kind!r} is {VERL_ESTIMATORS[kind]!r} here)" if kind in VERL_ESTIMATORS else ""
        raise ValueError(f"unknown KL estimator {kind!r}{here}: use one of {', '.join(KL_ESTIMATORS)}")
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and reference_logprobs {tuple(reference_logprobs.shape)} differ in shape"
        )
    return KL_ESTIMATORS[kind](logprobs, reference_logprobs.detach())


@dataclass(frozen=True)
class FixedKLController:
    """A coefficient that stays.

    Raises:
        ValueError: a coefficient below 0.
    """

    coef: float

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"the KL coefficient must not be negative, got {self.coef}")


@dataclass(frozen=True)
class AdaptiveKLController:
    """A coefficient that steers the observed KL towards `target`, at a speed set by `horizon`; see `update`.

    Raises:
        ValueError: a coefficient below 0, a target or a horizon that is not above 0.
    """

    coef: float
    target: float
    horizon: float
    """In the unit of `update`'s num_steps: samples, in verl and in the paper."""

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"the KL coefficient must not be negative, got {self.coef}")
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(f"target KL and horizon must be above 0, got target={self.target}, horizon={self.horizon}")


KLController = FixedKLController | AdaptiveKLController
C = TypeVar("C", FixedKLController, AdaptiveKLController)


def update(controller: C, observed_kl: float, num_steps: float) -> C:
    """The controller after a step that observed a mean KL of `observed_kl` over `num_steps` samples.

        error = clip(observed_kl / target - 1, -0.2, 0.2)
        coef  = coef * (1 + error * num_steps / horizon)

    Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), section 2.2. A fixed controller is returned
    as it is. So is an adaptive one when the observed KL is NaN: the loss of such a step is not finite either and is
    dealt with there, and a coefficient that once is NaN would stay NaN.

    Raises:
        ValueError: a negative number of steps.

    >>> controller = AdaptiveKLController(coef=0.5, target=6.0, horizon=1_000)
    >>> update(controller, observed_kl=12.0, num_steps=500).coef  # 0.5 * (1 + 0.2 * 500 / 1000)
    0.55
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must not be negative, got {num_steps}")
    if isinstance(controller, FixedKLController) or math.isnan(observed_kl):
        return controller
    error = min(max(observed_kl / controller.target - 1.0, -0.2), 0.2)
    return replace(controller, coef=controller.coef * (1.0 + error * num_steps / controller.horizon))
