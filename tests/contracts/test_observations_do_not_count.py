"""Observations in an answer change nothing that is computed from it: with them, NaN at all their places, each loss
token has the same advantage, correction, weight and gradient as without them, and every figure is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import GROUP_ADVANTAGES
from megarl.algorithms.aggregation import AGGREGATIONS, sequence_weights
from megarl.algorithms.correction import step_correction
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.step_advantages import step_advantages, whitened
from megarl.config import ActorConfig, AlgorithmConfig, CorrectionConfig, CriticConfig
from megarl.data.packing import TokenSequence, pack
from megarl.engines.megatron import TokenBatch, TokenOutputs
from megarl.engines.objectives import policy_objective, value_objective
from megarl.engines.rollout_mismatch import rollout_mismatch
from megarl.types import Sample, SampleInfo

LENGTHS = (3, 1, 6, 2)
SCORES = [1.0, 0.0, 0.5, 0.25]


class Answers(NamedTuple):
    """Samples, and what the trainer has of their tokens: [R] each."""

    samples: list[Sample]
    logprobs: list[np.ndarray]
    reference: list[np.ndarray]
    values: list[np.ndarray]


def plain() -> Answers:
    draw = np.random.default_rng(2)
    samples = []
    for i, length in enumerate(LENGTHS):
        samples.append(
            Sample(
                uid=f"0-{i // 2}/{i % 2}",
                group=f"0-{i // 2}",
                prompt_ids=np.array([1, 2]),
                response_ids=draw.integers(0, 9, length),
                rollout_logprobs=-draw.random(length).astype(np.float32) - 0.1,
                loss_mask=np.ones(length, np.bool_),
                weight_versions=np.zeros(length, np.int64),
                score=SCORES[i],
                finish_reason="stop",
                data_source="s",
            )
        )
    near = [s.rollout_logprobs + draw.normal(0, 0.4, len(s.loss_mask)).astype(np.float32) for s in samples]
    far = [n + draw.normal(0, 0.5, len(n)).astype(np.float32) for n in near]
    values = [draw.normal(size=len(n)).astype(np.float32) for n in near]
    return Answers(samples, near, far, values)


def with_observations(answers: Answers) -> Answers:
    """Some between any two tokens, at the beginning and at the end."""
    draw = np.random.default_rng(3)
    samples: list[Sample] = []
    arrays: list[list[np.ndarray]] = [[], [], []]
    for i, sample in enumerate(answers.samples):
        length = len(sample.response_ids)
        places = np.repeat(np.arange(length + 1), draw.integers(0, 3, length + 1))
        spoiled = [np.insert(own[i], places, np.nan).astype(np.float32) for own in answers[1:]]
        samples.append(
            replace(
                sample,
                response_ids=np.insert(sample.response_ids, places, 7),
                rollout_logprobs=np.insert(sample.rollout_logprobs, places, np.nan).astype(np.float32),
                loss_mask=np.insert(sample.loss_mask, places, False),
                weight_versions=np.insert(sample.weight_versions, places, 0),
            )
        )
        for kept, one in zip(arrays, spoiled, strict=True):
            kept.append(one)
    assert sum(len(s.loss_mask) for s in samples) >= sum(LENGTHS) + 8
    return Answers(samples, *arrays)


BOTH = (plain(), with_observations(plain()))


def at_loss_tokens(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate([v[s.loss_mask] for v, s in zip(values, samples, strict=True)])


def elsewhere(values: Sequence[np.ndarray], samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate([v[~s.loss_mask] for v, s in zip(values, samples, strict=True)])


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp", *GROUP_ADVANTAGES])
def test_advantages_returns_rewards_kl_and_whitening(advantage: Any) -> None:
    config = AlgorithmConfig(advantage=advantage, gamma=0.9, lam=0.8)
    found = []
    for samples, logprobs, reference, values in BOTH:
        infos = [SampleInfo.of(sample) for sample in samples]
        groups, lengths = [info.group for info in infos], [info.num_loss_tokens for info in infos]
        own = GROUP_ADVANTAGES[advantage](SCORES, groups, lengths, True) if advantage in GROUP_ADVANTAGES else None
        coef = 0.3 if own is None else 0.0
        result = step_advantages(config, coef, samples, logprobs, reference, values, own)
        white = whitened(result.advantages, samples, result.moments)
        for arrays in (result.advantages, result.returns or [], white):
            if arrays:
                assert not elsewhere(arrays, samples).any()
        returns = result.returns or [np.zeros(len(s.loss_mask)) for s in samples]
        found.append([at_loss_tokens(arrays, samples) for arrays in (result.advantages, white, returns)])
        found[-1].append(result.rewards)
        found[-1] += [np.array([m.count, m.total, m.total_of_squares]) for m in (result.kl, result.moments)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
    assert np.abs(found[0][0]).max() > 0.1


@pytest.mark.parametrize("weights", ["none", "token", "sequence"])
@pytest.mark.parametrize("reject", ["none", "token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_corrections_and_their_figures(weights: Any, reject: Any, kind: Any) -> None:
    config = CorrectionConfig(weights, 1.3, None, reject, kind, 1.4 if kind == "k1" else 0.1)
    found = []
    for samples, logprobs, _, _ in BOTH:
        factors, figures = step_correction(config, samples, logprobs)
        assert not elsewhere(factors, samples).any()
        found.append((at_loss_tokens(factors, samples), figures.metrics()))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5, abs=1e-7)


def test_the_mismatch_of_rollout_and_trainer() -> None:
    (own, difference), (other, other_difference) = (rollout_mismatch(samples, lp) for samples, lp, _, _ in BOTH)
    assert (other.moments.count, other.max) == (own.moments.count, own.max)
    assert other.mean == pytest.approx(own.mean)
    assert other_difference == difference
    assert own.mean > 0.01


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [*POLICY_LOSSES, "critic"])
def test_losses_gradients_and_metrics(name: Any, aggregation: str) -> None:
    """Packed with padding, all in one micro-batch."""
    config = ActorConfig(policy_loss=name if name != "critic" else "ppo", entropy_coef=0.1, kl_loss_coef=0.2)
    objective = value_objective(CriticConfig()) if name == "critic" else policy_objective(config)
    found = []
    for answers in BOTH:
        samples, logprobs, reference, values = answers
        counts = [SampleInfo.of(sample).num_loss_tokens for sample in samples]
        total, sequences = sum(counts), len(counts)
        given: dict[str, Any] = (
            {"old_values": values, "returns": [2 * v for v in values]}
            if name == "critic"
            else {"old_logprobs": logprobs, "reference_logprobs": reference, "advantages": values}
        )
        shares: dict[str, Any] = {
            "loss_weight": sequence_weights(aggregation, counts, total, sequences, 10.0),
            "token_weight": sequence_weights("token-mean", counts, total, sequences),
            "sequence": [float(i) for i in range(len(samples))],
        }
        # What the model says now is something of its own; at observations it is NaN too.
        now = [1.3 * lp - 0.1 * v for lp, v in zip(logprobs, values, strict=True)]
        batch = pack([TokenSequence.of(s) for s in samples], {**given, "now": now}, shares, multiple=4)
        per_token = {key: torch.from_numpy(own) for key, own in batch.per_token.items()}
        own = per_token.pop("now").requires_grad_()
        outputs = TokenOutputs(values=own) if name == "critic" else TokenOutputs(own, own * own)
        loss, sums = objective(outputs, TokenBatch(torch.from_numpy(batch.mask), per_token))
        (gradient,) = torch.autograd.grad(loss, own)
        found.append((float(loss), {key: float(one) for key, one in sums.items()}, gradient[batch.mask].numpy()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(found[1][2], found[0][2], rtol=1e-5, atol=1e-7)
    assert np.abs(found[0][2]).max() > 1e-3
