"""The loss closures: sums that do not see the split, tokens that do not count, entropy and KL by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.config import ActorConfig, CriticConfig
from megarl.engines.megatron import TokenBatch, TokenOutputs
from megarl.engines.objectives import policy_objective, value_objective

ACTOR = ActorConfig(entropy_coef=0.1, kl_loss_coef=0.2, kl_loss_kind="k1")


def token_batch(mask: list[bool], **per_token: list[float]) -> TokenBatch:
    return TokenBatch(torch.tensor(mask), {name: torch.tensor(values) for name, values in per_token.items()})


def random_batch(count: int, *names: str) -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(count, generator=generator) for name in names}
    for name in ("loss_weight", "token_weight"):
        values[name] = torch.rand(count, generator=generator)
    return TokenBatch(torch.rand(count, generator=generator) < 0.7, values)


POLICY = ("old_logprobs", "advantages", "reference_logprobs")
VALUE = ("old_values", "returns")


def part(batch: TokenBatch, where: slice) -> TokenBatch:
    return TokenBatch(batch.mask[where], {name: values[where] for name, values in batch.per_token.items()})


def add(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert first.keys() == second.keys()
    return {name: first[name] + second[name] for name in first}


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("name", [*POLICY_LOSSES, "critic"])
def test_two_micro_batches_add_up_to_one(name: Any, kind: Any) -> None:
    """Loss, metrics and gradient; three sequences, the cut is between the first and the second. Of the actor's losses
    each with each KL; without old log-probs for k2."""
    role = "critic" if name == "critic" else "actor"
    batch = random_batch(40, *(POLICY if role == "actor" else VALUE))
    batch.per_token["sequence"] = torch.tensor([0.0] * 13 + [1.0] * 20 + [2.0] * 7)
    objective = value_objective(CriticConfig())
    if role == "actor":
        batch.per_token["importance_weights"] = torch.rand(40, generator=torch.Generator().manual_seed(6))
        objective = policy_objective(replace(ACTOR, policy_loss=name, kl_loss_kind=kind))
        if kind == "k2":
            del batch.per_token["old_logprobs"]
    own = torch.randn(40, generator=torch.Generator().manual_seed(4)).requires_grad_()
    entropy = torch.rand(40, generator=torch.Generator().manual_seed(5)).requires_grad_()

    def run(where: slice) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        outputs = TokenOutputs(own[where], entropy[where]) if role == "actor" else TokenOutputs(values=own[where])
        return objective(outputs, part(batch, where))

    loss, sums = run(slice(0, 40))
    loss.backward()
    whole, own.grad = own.grad, None
    (first, first_sums), (second, second_sums) = run(slice(0, 13)), run(slice(13, 40))
    (first + second).backward()
    torch.testing.assert_close(first + second, loss)
    torch.testing.assert_close(add(first_sums, second_sums), dict(sums))
    torch.testing.assert_close(own.grad, whole)
    assert whole is not None
    assert whole.count_nonzero() > 10


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("name", ["ppo", "sapo", "gpg"])
def test_gradcheck_of_the_whole_objective(name: Any, kind: Any) -> None:
    """Policy loss, entropy bonus and KL, weighted and summed, in float64. The losses and kinds that hold something
    constant are checked by themselves (tests of losses.py and kl.py)."""
    batch = random_batch(12, *POLICY)
    batch = TokenBatch(batch.mask, {name: values.double() for name, values in batch.per_token.items()})
    objective = policy_objective(replace(ACTOR, policy_loss=name, kl_loss_kind=kind), entropy_coef=0.3)
    own, entropy = (torch.randn(12, generator=torch.Generator().manual_seed(seed)).double() for seed in (4, 5))
    inputs = (own.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, y: objective(TokenOutputs(x, y), batch)[0], inputs)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradcheck_of_the_value_objective(clip: float | None) -> None:
    batch = random_batch(12, *VALUE)
    batch = TokenBatch(batch.mask, {name: values.double() for name, values in batch.per_token.items()})
    objective = value_objective(CriticConfig(value_clip=clip))
    values = torch.randn(12, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: objective(TokenOutputs(values=x), batch)[0], (values,))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_without_old_logprobs_the_present_ones_serve(name: Any) -> None:
    """Value, figures and gradient are those with old log-probs that equal the present ones; ratio 1, so no KL and no
    clip, and the gradient is -A times the token's weight."""
    given = random_batch(20, "advantages")
    given.per_token["sequence"] = torch.tensor([0.0] * 8 + [1.0] * 12)
    logprobs = torch.randn(20, generator=torch.Generator().manual_seed(4)).requires_grad_()
    objective = policy_objective(ActorConfig(policy_loss=name))
    loss, sums = objective(TokenOutputs(logprobs), given)
    with_old = TokenBatch(given.mask, {**given.per_token, "old_logprobs": logprobs.detach()})
    same_loss, same_sums = objective(TokenOutputs(logprobs), with_old)
    assert loss.item() == same_loss.item()
    assert {name: float(value) for name, value in sums.items()} == {name: float(v) for name, v in same_sums.items()}
    assert (float(sums["actor/ppo_kl"]), float(sums["actor/pg_clipfrac"])) == (0.0, 0.0)
    (grad,) = torch.autograd.grad(loss, logprobs)
    wanted = -given.per_token["advantages"] * given.per_token["loss_weight"]
    torch.testing.assert_close(grad, torch.where(given.mask, wanted, 0.0))


def test_the_weight_of_the_entropy_bonus_may_be_given() -> None:
    """Policy -1, entropy 3, at weight 1: less 0.5 x 3, less nothing, or (none given) less the config's 0.1 x 3."""
    given = token_batch([True], old_logprobs=[-1.0], advantages=[1.0], loss_weight=[1.0], token_weight=[1.0])
    outputs = TokenOutputs(torch.tensor([-1.0]), torch.tensor([3.0]))
    losses = {
        coef: float(policy_objective(ActorConfig(entropy_coef=0.1), entropy_coef=coef)(outputs, given)[0])
        for coef in (0.5, 0.0, None)
    }
    assert losses == pytest.approx({0.5: -2.5, 0.0: -1.0, None: -1.3})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_do_not_count_get_exactly_no_gradient(bad: float) -> None:
    """Whatever the model says there now, said before the update, and whatever the reference says."""
    mask = [True, False, True, False]
    weights = {"loss_weight": [0.5] * 4, "token_weight": [0.5] * 4}
    bads = [-1.0, bad, -2.0, bad]
    given = token_batch(mask, old_logprobs=bads, reference_logprobs=bads, advantages=[1.0, bad, -1.0, bad], **weights)
    logprobs = torch.tensor([-1.1, bad, -2.1, bad], requires_grad=True)
    entropy = torch.tensor([0.3, bad, 0.3, bad], requires_grad=True)
    options = [{"kl_loss_kind": kind} for kind in ("k1", "abs", "k2", "k3")]
    for option in (*options, *({"policy_loss": name} for name in ("cispo", "sapo", "gpg", "gspo"))):
        given.per_token["sequence"] = torch.tensor([0.0, bad, 1.0, bad])
        loss, sums = policy_objective(replace(ACTOR, **option))(TokenOutputs(logprobs, entropy), given)
        assert loss.isfinite()
        assert all(value.isfinite() for value in sums.values()), sums
        logprob_grad, entropy_grad = torch.autograd.grad(loss, (logprobs, entropy))
        for grad in (logprob_grad, entropy_grad):
            assert (grad[[1, 3]] == 0).all()
            assert (grad[[0, 2]] != 0).all()
            assert grad.isfinite().all()
    values = torch.tensor([1.0, bad, 2.0, bad], requires_grad=True)
    given = token_batch(mask, old_values=[1.0, bad, 2.0, bad], returns=[2.0, bad, 0.0, bad], **weights)
    loss, sums = value_objective(CriticConfig())(TokenOutputs(values=values), given)
    (grad,) = torch.autograd.grad(loss, values)
    assert grad.tolist() == [-0.5, 0.0, 1.0, 0.0]
    assert all(value.isfinite() for value in sums.values()), sums


def test_the_policy_loss_by_hand() -> None:
    """Two loss tokens of weight 1/2. Ratios 1.5 (A = 2, clipped to 1.2: -2.4) and 1 (A = -1: 1): -0.7 in all.

    Entropy (0.5 + 1.5) / 2 = 1, k1 to the reference (log 1.5 + 0.25) / 2.
    """
    log = math.log(1.5)
    given = token_batch(
        [True, True, False],
        old_logprobs=[-2.0, -1.0, 0.0],
        advantages=[2.0, -1.0, 9.0],
        reference_logprobs=[-2.0, -1.25, 9.0],
        loss_weight=[0.5, 0.5, 9.0],
        token_weight=[0.5, 0.5, 9.0],
    )
    outputs = TokenOutputs(torch.tensor([log - 2.0, -1.0, 5.0]), torch.tensor([0.5, 1.5, 7.0]))
    loss, sums = policy_objective(ACTOR)(outputs, given)
    kl = (log + 0.25) / 2
    expected = {
        "actor/pg_loss": -0.7,
        "actor/pg_clipfrac": 0.5,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": -log / 2,
        "actor/entropy_in_update": 1.0,
        "actor/kl_loss": kl,
        "actor/kl_coef": 0.2,
    }
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected)
    assert float(loss) == pytest.approx(-0.7 - 0.1 * 1.0 + 0.2 * kl)


def test_terms_that_the_config_does_not_ask_for_are_absent() -> None:
    given = token_batch([True], old_logprobs=[-1.0], advantages=[1.0], loss_weight=[1.0], token_weight=[1.0])
    loss, sums = policy_objective(ActorConfig())(TokenOutputs(torch.tensor([-1.0])), given)
    assert float(loss) == -1.0
    assert sums.keys() == {"actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}


def test_importance_weights_scale_the_policy_loss_alone() -> None:
    """At weight 1/2 each: the policy's -1 and -2 by 0.5 and 0 (rejected), entropy 1 and 3, k1 0.5 and 2 as they are."""
    given = token_batch(
        [True, True],
        old_logprobs=[-1.0, -1.0],
        advantages=[1.0, 2.0],
        reference_logprobs=[-1.5, -3.0],
        importance_weights=[0.5, 0.0],
        loss_weight=[0.5, 0.5],
        token_weight=[0.5, 0.5],
    )
    outputs = TokenOutputs(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 3.0]))
    loss, sums = policy_objective(ACTOR)(outputs, given)
    assert float(sums["actor/pg_loss"]) == -0.25
    assert float(loss) == pytest.approx(-0.25 - 0.1 * 2.0 + 0.2 * 1.25)


WEIGHTS = {"loss_weight": [0.25] * 4, "token_weight": [0.25] * 4}


@pytest.mark.parametrize(
    ("options", "expected", "clipfrac"),
    [
        # Ratios 2, 1 / 2, 1 (no loss), 2 against A = 1, 1, -, -1, all log-probs -1: sums of the four over 4.
        ({"policy_loss": "ppo"}, -1.2 - 0.5 + 2.0, 0.25),  # the first is clipped at 1.2
        ({"policy_loss": "ppo", "clip_high": 2.0, "dual_clip": 1.5}, -2.0 - 0.5 + 1.5, 0.0),
        # Sequences of tokens 0 and 1 (mean log ratio 0) and of token 3 (ratio 2, A < 0: not clipped)
        ({"policy_loss": "gspo"}, -1.0 - 1.0 + 2.0, 0.0),
        ({"policy_loss": "cispo"}, 1.2 + 0.5 - 1.2, 0.5),  # its own clips: none below, 0.2 above
        ({"policy_loss": "cispo", "clip_low": 0.25, "clip_high": 0.5}, 1.5 + 0.75 - 1.5, 0.75),
        ({"policy_loss": "gpg"}, 1.0 + 1.0 - 1.0, 0.0),
        # 4 / tau * sigmoid(tau * (ratio - 1)), tau 1 and 2: 4 * 0.7310586, 4 * 0.3775407, 2 * 0.8807971
        ({"policy_loss": "sapo", "sapo_tau_negative": 2.0}, -2.9242343 - 1.5101627 + 1.7615942, 0.0),
    ],
)
def test_each_policy_loss_reads_its_own_keys(options: dict[str, Any], expected: float, clipfrac: float) -> None:
    log = math.log(2.0)
    given = token_batch(
        [True, True, False, True],
        old_logprobs=[-1.0 - log, -1.0 + log, 5.0, -1.0 - log],
        advantages=[1.0, 1.0, 9.0, -1.0],
        sequence=[0.0, 0.0, 0.0, 1.0],
        **WEIGHTS,
    )
    outputs = TokenOutputs(torch.tensor([-1.0, -1.0, 7.0, -1.0]))
    loss, sums = policy_objective(ActorConfig(**options))(outputs, given)
    assert float(loss) == pytest.approx(expected / 4)
    assert float(sums["actor/pg_clipfrac"]) == clipfrac
    assert sums.keys() == {"actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}


def test_gspo_clips_at_the_papers_range() -> None:
    """Mean log ratios 0.001 and -0.001: outside 1 - 3e-4 .. 1 + 4e-4 for A > 0 above and A < 0 below."""
    given = token_batch(
        [True] * 4,
        old_logprobs=[-1.0] * 4,
        advantages=[1.0, 1.0, -1.0, -1.0],
        sequence=[0.0, 0.0, 1.0, 1.0],
        **WEIGHTS,
    )
    logprobs = torch.tensor([-0.5, -1.498, -1.502, -0.5], requires_grad=True)
    loss, sums = policy_objective(ActorConfig(policy_loss="gspo"))(TokenOutputs(logprobs), given)
    assert float(sums["actor/pg_clipfrac"]) == 1.0
    assert loss.item() == pytest.approx((-1.0004 + 0.9997) / 2, abs=1e-7)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert grad.tolist() == [0.0] * 4


def test_losses_and_metrics_have_weights_of_their_own() -> None:
    """The aggregation decides the loss; metrics are means over tokens."""
    given = token_batch(
        [True, True],
        old_logprobs=[-1.0, -1.0],
        advantages=[1.0, 2.0],
        reference_logprobs=[-1.5, -3.0],
        loss_weight=[0.25, 1.0],
        token_weight=[0.5, 0.5],
    )
    outputs = TokenOutputs(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 3.0]))
    loss, sums = policy_objective(ACTOR)(outputs, given)
    # Policy -(0.25 + 2), entropy 0.25 + 3, k1 0.25 x 0.5 + 2.
    assert float(loss) == pytest.approx(-2.25 - 0.1 * 3.25 + 0.2 * 2.125)
    assert [float(sums[f"actor/{name}"]) for name in ("pg_loss", "entropy_in_update", "kl_loss")] == [-2.25, 2.0, 1.25]
    given = token_batch(
        [True, True], old_values=[0.0, 0.0], returns=[2.0, 0.0], loss_weight=[0.25, 1.0], token_weight=[0.5, 0.5]
    )
    loss, sums = value_objective(CriticConfig(value_clip=0.5))(TokenOutputs(values=torch.tensor([1.0, 1.0])), given)
    # Clipped to 0.5: errors 1.5 and 0.5 against plain ones of 1 and 1. The larger counts: 1.125 (clipped) and 0.5.
    assert float(loss) == 0.25 * 1.125 + 0.5
    assert {name: float(value) for name, value in sums.items()} == {
        "critic/vf_loss": 0.25 * 1.125 + 0.5,
        "critic/vf_clipfrac": 0.5,
        "critic/vpred_mean": 1.0,
    }
