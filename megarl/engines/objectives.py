"""What the actor and the critic minimise: the loss closures that Megatron's schedule calls, around the pure losses.

Every per-token number they need comes packed with the micro-batch: `loss_weight` is the token's share of the loss over
all ranks (algorithms/aggregation.py), `token_weight` is 1 / loss tokens of the mini-batch over all ranks, for metrics
that are token means. So each sum here, added over micro-batches and ranks, is the global figure.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.losses import POLICY_LOSSES, value_loss
from megarl.config import ActorConfig, CriticConfig
from megarl.engines.megatron import LossFunction, TokenBatch, TokenOutputs

Sums = dict[str, torch.Tensor]


def policy_objective(
    config: ActorConfig, context: dist.ProcessGroup | None = None, entropy_coef: float | None = None
) -> LossFunction:
    """The policy loss that the config names, less the entropy bonus, plus the KL to the reference where the config asks
    for it.

    Per token: advantages, loss_weight, token_weight; old_logprobs, for which the present ones serve where they are not
    given; reference_logprobs for the KL; importance_weights, where given, multiply the policy loss alone; for gspo also
    sequence, the number of the token's sequence in the micro-batch, counted from 0.

    Args:
        context: the context-parallel ranks, over which gspo adds up sequences; None: this rank has them whole. With it
            every rank of the group must come here for every micro-batch, in the same order.
        entropy_coef: the bonus's weight; None: the config's.
    """
    options = _loss_options(config)
    bonus = config.entropy_coef if entropy_coef is None else entropy_coef

    def objective(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        assert outputs.logprobs is not None, "the actor's engine gives log-probs"
        given, mask = _counted(batch), batch.mask
        weight, token_weight = given["loss_weight"], given["token_weight"]
        logprobs = torch.where(mask, outputs.logprobs, 0.0)
        old_logprobs = given["old_logprobs"] if "old_logprobs" in given else logprobs.detach()
        whole = {}
        if config.policy_loss == "gspo":
            log_ratio = (logprobs - old_logprobs).detach()
            whole["sequence_log_ratio"] = _sequence_means(log_ratio, mask, given["sequence"], context)
        policy = POLICY_LOSSES[config.policy_loss](
            logprobs,
            old_logprobs,
            given["advantages"],
            importance_weights=given.get("importance_weights"),
            **options,
            **whole,
        )
        loss = (policy.loss * weight).sum()
        sums = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": (policy.clipped * token_weight).sum(),
            "actor/pg_clipfrac_lower": (policy.clipped_low * token_weight).sum(),
            "actor/ppo_kl": (policy.kl * token_weight).sum(),
        }
        if outputs.entropy is not None:
            entropy = torch.where(mask, outputs.entropy, 0.0)
            sums["actor/entropy_in_update"] = (entropy.detach() * token_weight).sum()
            loss = loss - bonus * (entropy * weight).sum()
        if config.kl_loss_coef > 0:
            kl = kl_estimate(config.kl_loss_kind, logprobs, given["reference_logprobs"])
            sums["actor/kl_loss"] = (kl.detach() * token_weight).sum()
            sums["actor/kl_coef"] = config.kl_loss_coef * token_weight.sum()  # the weights of all tokens sum to 1
            loss = loss + config.kl_loss_coef * (kl * weight).sum()
        return loss, sums

    return objective


def _loss_options(config: ActorConfig) -> dict[str, Any]:
    """The keys that belong to the policy loss, as its arguments."""
    if config.policy_loss == "sapo":
        return {"tau_positive": config.sapo_tau_positive, "tau_negative": config.sapo_tau_negative}
    if config.policy_loss == "gpg":
        return {}
    clip_low, clip_high = config.clip_range
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    return {**clips, "dual_clip": config.dual_clip} if config.policy_loss == "ppo" else clips


def _sequence_means(
    values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor, context: dist.ProcessGroup | None
) -> torch.Tensor:
    """At each token, the mean of its sequence's values over all its loss tokens, those on other context ranks too.

    T places are enough for the sums, and the same number on every context rank: packing gives each sequence at least
    one token on each of them. In float64, for a clip of 3e-4 leaves no room for rounding.
    """
    where = sequence.long()
    own = torch.stack([torch.where(mask, values, 0.0), mask.to(values.dtype)]).double()
    sums = torch.zeros_like(own).index_add_(1, where, own)
    if context is not None and context.size() > 1:
        dist.all_reduce(sums, group=context)
    return (sums[0] / sums[1].clamp(min=1.0))[where].to(values.dtype)


def value_objective(config: CriticConfig) -> LossFunction:
    """The clipped squared error of the values. Per token: old_values, returns, loss_weight, token_weight."""

    def objective(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        assert outputs.values is not None, "the critic's engine gives values"
        given, mask = _counted(batch), batch.mask
        weight, token_weight = given["loss_weight"], given["token_weight"]
        values = torch.where(mask, outputs.values, 0.0)
        value = value_loss(values, given["old_values"], given["returns"], config.value_clip)
        loss = (value.loss * weight).sum()
        sums = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": (value.clipped * token_weight).sum(),
            "critic/vpred_mean": (values.detach() * token_weight).sum(),
        }
        return loss, sums

    return objective


def _counted(batch: TokenBatch) -> dict[str, torch.Tensor]:
    """The per-token numbers, 0 on tokens that do not count: log-probs there may be anything, and 0 x inf is NaN."""
    return {name: torch.where(batch.mask, values, 0.0) for name, values in batch.per_token.items()}
