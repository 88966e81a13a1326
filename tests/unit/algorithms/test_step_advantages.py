"""From a step's rewards, log-probs and values to advantages: the pieces joined as they should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import GROUP_ADVANTAGES, Moments, gae, token_rewards
from megarl.algorithms.step_advantages import StepAdvantages, step_advantages, whitened
from megarl.config import AlgorithmConfig
from megarl.types import FloatArray, Sample

GAE = AlgorithmConfig(gamma=0.9, lam=0.8)


def sample(mask: list[bool], score: float) -> Sample:
    length = len(mask)
    return Sample(
        uid="u",
        group="g",
        prompt_ids=np.array([1, 2]),
        response_ids=np.zeros(length, np.int64),
        rollout_logprobs=np.zeros(length, np.float32),
        loss_mask=np.array(mask, np.bool_),
        weight_versions=np.zeros(length, np.int64),
        score=score,
        finish_reason="stop",
        data_source="s",
    )


SAMPLES = [
    sample([True, True, True], 1.0),
    sample([True, False, False, True, True], -0.5),
    sample([False, False], 3.0),
    sample([True], 2.0),
]


def random_arrays(seed: int) -> list[FloatArray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(len(s.response_ids)).astype(np.float32) for s in SAMPLES]


def test_gae_is_that_of_each_sample_by_itself() -> None:
    logprobs, reference, values = random_arrays(1), random_arrays(2), random_arrays(3)
    found = step_advantages(GAE, 0.25, SAMPLES, logprobs, reference, values)
    assert found.returns is not None
    penalties = []
    for i, one in enumerate(SAMPLES):
        mask = torch.from_numpy(one.loss_mask)
        penalty = torch.from_numpy(logprobs[i]) - torch.from_numpy(reference[i])
        penalties += penalty[mask].tolist()
        rewards = token_rewards(one.score, penalty, mask, 0.25)
        advantages, returns = gae(rewards, torch.from_numpy(values[i]), mask, 0.9, 0.8)
        np.testing.assert_allclose(found.advantages[i], advantages.numpy(), rtol=1e-6)
        np.testing.assert_allclose(found.returns[i], returns.numpy(), rtol=1e-6)
        assert found.rewards[i] == pytest.approx(float(rewards.sum()), rel=1e-5)
    assert (found.kl.count, found.kl.total) == (7, pytest.approx(sum(penalties), rel=1e-5))
    loss_tokens = np.concatenate([a[s.loss_mask] for s, a in zip(SAMPLES, found.advantages, strict=True)])
    assert found.moments == Moments(7, pytest.approx(loss_tokens.sum()), pytest.approx((loss_tokens**2).sum()))


def test_kl_in_the_reward_by_hand() -> None:
    """gamma = lam = 1 and values 0: an advantage is the sum of the rewards from its token on.

    Rewards: -0.1 x 0.5 = -0.05; the tool's token none; 1 - 0.1 x (-1) = 1.1.
    """
    one = [sample([True, False, True], 1.0)]
    logprobs, reference = [np.array([-1.0, -9.0, -2.0])], [np.array([-1.5, 7.0, -1.0])]
    config, values = AlgorithmConfig(), [np.zeros(3, np.float32)]
    found = step_advantages(config, 0.1, one, logprobs, reference, values)
    np.testing.assert_allclose(found.advantages[0], [1.05, 0.0, 1.1], rtol=1e-6)
    assert found.rewards.tolist() == pytest.approx([1.05])
    assert found.kl == Moments(2, -0.5, 1.25)
    # A coefficient of 0 leaves the reward alone; the KL is still measured.
    free = step_advantages(config, 0.0, one, logprobs, reference, values)
    np.testing.assert_allclose(free.advantages[0], [1.0, 0.0, 1.0])
    assert free.kl == found.kl
    absolute = step_advantages(replace(config, kl_in_reward_kind="abs"), 0.1, one, logprobs, reference, values)
    np.testing.assert_allclose(absolute.advantages[0], [0.85, 0.0, 0.9], rtol=1e-6)


def test_reinforce_pp_by_hand() -> None:
    """gamma 0.5. Rewards as above, -0.05 and 1.1, the tool's token stepped over: -0.05 + 0.5 x 1.1 = 0.5."""
    one = [sample([True, False, True], 1.0)]
    logprobs, reference = [np.array([-1.0, -9.0, -2.0])], [np.array([-1.5, 7.0, -1.0])]
    found = step_advantages(AlgorithmConfig(advantage="reinforce_pp", gamma=0.5), 0.1, one, logprobs, reference)
    np.testing.assert_allclose(found.advantages[0], [0.5, 0.0, 1.1], rtol=1e-6)
    assert found.returns is None
    assert found.moments == Moments(2, pytest.approx(1.6), pytest.approx(0.25 + 1.21))
    assert found.kl == Moments(2, -0.5, 1.25)


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, "remax"])
def test_advantages_of_whole_answers_lie_on_loss_tokens_only(advantage: str) -> None:
    config = AlgorithmConfig(advantage=advantage)  # type: ignore[arg-type]
    found = step_advantages(config, 0.0, SAMPLES, random_arrays(1), sample_advantages=[0.5, -2.0, 9.0, 4.0])
    assert [a.tolist() for a in found.advantages] == [[0.5] * 3, [-2.0, 0, 0, -2.0, -2.0], [0, 0], [4.0]]
    assert found.returns is None
    assert found.moments == Moments(7, 1.5 - 6.0 + 4.0, 0.75 + 12.0 + 16.0)
    assert found.kl == Moments(0, 0.0, 0.0)
    # A score is given at the last loss token, so a sample without any has none.
    assert found.rewards.tolist() == [1.0, -0.5, 0.0, 2.0]


def test_what_an_estimator_needs_must_be_there() -> None:
    with pytest.raises(ValueError, match="gae needs the critic's values"):
        step_advantages(GAE, 0.0, SAMPLES, random_arrays(1))
    for name in ("rloo", "remax"):
        with pytest.raises(ValueError, match=f"{name} needs each sample's advantage"):
            step_advantages(AlgorithmConfig(advantage=name), 0.0, SAMPLES, random_arrays(1))  # type: ignore[arg-type]
    for logprobs, reference in ((None, random_arrays(2)), (random_arrays(1), None)):
        with pytest.raises(ValueError, match=r"a KL penalty of 0\.25 needs the policy's and the reference's log-probs"):
            step_advantages(GAE, 0.25, SAMPLES, logprobs, reference, random_arrays(3))


def test_log_probs_that_nobody_computed_are_not_missed() -> None:
    """Without a KL in the reward they only measure it: all else is as with them."""
    values, reference = random_arrays(3), random_arrays(2)
    known = step_advantages(GAE, 0.0, SAMPLES, random_arrays(1), reference, values)
    unknown = step_advantages(GAE, 0.0, SAMPLES, None, reference, values)
    for one, other in zip(known.advantages, unknown.advantages, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (known.kl.count, unknown.kl) == (7, Moments(0, 0.0, 0.0))
    assert unknown.rewards.tolist() == known.rewards.tolist()
    assert unknown.moments == known.moments


WHITENED = [GAE, AlgorithmConfig(advantage="reinforce_pp"), AlgorithmConfig(advantage="reinforce_pp_baseline")]


def compute(config: AlgorithmConfig, samples: list[Sample], which: slice) -> StepAdvantages:
    arrays = [random_arrays(seed)[which] for seed in (1, 2, 3)]
    given = [0.5, -2.0, 9.0, 4.0][which] if config.compares_answers else None
    return step_advantages(config, 0.1, samples, arrays[0], arrays[1], arrays[2], given)


@pytest.mark.parametrize("config", WHITENED, ids=lambda config: config.advantage)
def test_ranks_whiten_as_if_their_samples_lay_together(config: AlgorithmConfig) -> None:
    """Mean 0 and (unbiased) variance 1 over the loss tokens of both ranks; 0 elsewhere."""
    assert config.whitens
    first, second = compute(config, SAMPLES[:2], slice(0, 2)), compute(config, SAMPLES[2:], slice(2, 4))
    moments = first.moments + second.moments
    found = whitened(first.advantages, SAMPLES[:2], moments) + whitened(second.advantages, SAMPLES[2:], moments)
    tokens = np.concatenate([a[s.loss_mask] for s, a in zip(SAMPLES, found, strict=True)])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1.0, rel=1e-5)
    assert all((a[~s.loss_mask] == 0).all() for s, a in zip(SAMPLES, found, strict=True))
    assert [len(a) for a in found] == [3, 5, 2, 1]
    together = compute(config, SAMPLES, slice(None))
    for split, whole in zip(found, whitened(together.advantages, SAMPLES, together.moments), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("config", [GAE, AlgorithmConfig(advantage="rloo"), AlgorithmConfig(advantage="reinforce_pp")])
def test_a_rank_without_samples_has_sums_of_nothing(config: AlgorithmConfig) -> None:
    found = step_advantages(config, 0.1, [], [], [], [], [])
    assert (found.advantages, found.moments, found.kl) == ([], Moments(0, 0.0, 0.0), Moments(0, 0.0, 0.0))
    assert len(found.rewards) == 0
    assert whitened([], [], Moments(3, 1.0, 1.0)) == []
