from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import (
    GROUP_ADVANTAGES,
    Moments,
    discounted_returns,
    dr_grpo,
    gae,
    gae_packed,
    gpg,
    grpo,
    grpo_passk,
    opo,
    remax,
    rloo,
    token_rewards,
    whiten,
)

T, F = True, False
score = st.floats(-10.0, 10.0)
answers = st.lists(st.tuples(score, st.integers(0, 3)), min_size=1, max_size=16)


def gae_by_definition(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l} over the loss tokens, as the paper writes it."""
    steps = [t for t, m in enumerate(mask) if m]
    values_of_steps = [values[t] for t in steps] + [0.0]
    deltas = [rewards[t] + gamma * after - v for t, (v, after) in zip(steps, pairwise(values_of_steps), strict=True)]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(steps):
        advantages[t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[i:]))
    return advantages


class TestTokenRewards:
    def test_worked_by_hand(self) -> None:
        # Last loss token is position 2: 1 - 0.5 * 0.4 = 0.8. Position 0: -0.5 * 0.2 = -0.1. The others are masked.
        rewards = token_rewards(1.0, torch.tensor([0.2, 7.0, 0.4, math.nan]), torch.tensor([T, F, T, F]), kl_coef=0.5)
        torch.testing.assert_close(rewards, torch.tensor([-0.1, 0.0, 0.8, 0.0]))

    def test_without_kl_only_the_last_loss_token_is_rewarded(self) -> None:
        assert token_rewards(2.0, None, torch.tensor([T, T, F]), kl_coef=0.5).tolist() == [0.0, 2.0, 0.0]

    def test_no_loss_token_no_reward(self) -> None:
        assert token_rewards(2.0, None, torch.tensor([F, F]), kl_coef=0.5).tolist() == [0.0, 0.0]
        assert token_rewards(2.0, None, torch.zeros(0, dtype=torch.bool), kl_coef=0.5).tolist() == []

    def test_does_not_write_into_its_inputs(self) -> None:
        kl = torch.tensor([1.0, 1.0])
        token_rewards(1.0, kl, torch.tensor([T, T]), kl_coef=1.0)
        assert kl.tolist() == [1.0, 1.0]


class TestGAE:
    def test_worked_by_hand(self) -> None:
        # gamma = 0.5, lam = 0.5, gamma * lam = 0.25
        # delta_2 = 4 + 0.5 * 0 - 2 = 2          A_2 = 2
        # delta_1 = 0 + 0.5 * 2 - 3 = -2         A_1 = -2 + 0.25 * 2 = -1.5
        # delta_0 = 1 + 0.5 * 3 - 1 = 1.5        A_0 = 1.5 - 0.25 * 1.5 = 1.125
        # returns = A + V = 2.125, 1.5, 4
        mask = torch.tensor([T, T, T])
        advantages, returns = gae(torch.tensor([1.0, 0.0, 4.0]), torch.tensor([1.0, 3.0, 2.0]), mask, 0.5, 0.5)
        assert advantages.tolist() == [1.125, -1.5, 2.0]
        assert returns.tolist() == [2.125, 1.5, 4.0]

    def test_observation_tokens_are_stepped_over(self) -> None:
        # The same sequence with observations put between; what stands there must not matter, be it NaN.
        junk = math.nan
        mask = torch.tensor([F, T, F, F, T, T, F])
        rewards = torch.tensor([junk, 1.0, junk, junk, 0.0, 4.0, junk])
        values = torch.tensor([junk, 1.0, junk, junk, 3.0, 2.0, junk])
        advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
        assert advantages.tolist() == [0.0, 1.125, 0.0, 0.0, -1.5, 2.0, 0.0]
        assert returns.tolist() == [0.0, 2.125, 0.0, 0.0, 1.5, 4.0, 0.0]

    def test_with_gamma_and_lam_one_the_return_is_the_score(self) -> None:
        values = torch.tensor([0.3, -0.2, 0.9])
        advantages, returns = gae(torch.tensor([0.0, 0.0, 1.0]), values, torch.tensor([T, T, T]), 1.0, 1.0)
        torch.testing.assert_close(returns, torch.ones(3))
        torch.testing.assert_close(advantages, 1.0 - values)

    @given(st.data())
    def test_equals_the_definition_for_any_packing(self, data: st.DataObject) -> None:
        number = st.floats(-2.0, 2.0)
        token = st.tuples(number, number, st.booleans())
        sequences = data.draw(st.lists(st.lists(token, max_size=6), max_size=4))
        gamma, lam = data.draw(st.floats(0.0, 1.0)), data.draw(st.floats(0.0, 1.0))
        tokens = [token for sequence in sequences for token in sequence]
        rewards = torch.tensor([r for r, _, _ in tokens], dtype=torch.float64)
        values = torch.tensor([v for _, v, _ in tokens], dtype=torch.float64)
        mask = torch.tensor([m for _, _, m in tokens], dtype=torch.bool)
        advantages, returns = gae_packed(rewards, values, mask, [len(s) for s in sequences], gamma, lam)

        expected: list[float] = []
        for sequence in sequences:
            columns = [r for r, _, _ in sequence], [v for _, v, _ in sequence], [m for _, _, m in sequence]
            expected += gae_by_definition(*columns, gamma, lam)
        torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0), rtol=0, atol=0)

    def test_is_float32_at_least_and_carries_no_gradient(self) -> None:
        values = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
        advantages, returns = gae(torch.zeros(2), values, torch.tensor([T, T]), 1.0, 1.0)
        assert advantages.dtype == returns.dtype == torch.float32
        assert not advantages.requires_grad
        assert not returns.requires_grad

    def test_a_step_of_a_thousand_sequences_is_fast(self) -> None:
        # 0.05 s on an idle core; the bound is for a busy one. A loop over tokens would take seconds.
        lengths = [1000 - i % 500 for i in range(1024)]
        rewards, values = torch.randn(sum(lengths)), torch.randn(sum(lengths))
        mask = torch.rand(sum(lengths)) > 0.05
        durations = []
        for _ in range(5):
            start = time.process_time()
            gae_packed(rewards, values, mask, lengths, 1.0, 0.95)
            durations.append(time.process_time() - start)
        assert min(durations) < 0.5

    def test_wrong_arguments_are_refused(self) -> None:
        zeros, mask = torch.zeros(3), torch.tensor([T, T, T])
        with pytest.raises(ValueError, match=r"values \(3, 1\) and its mask \(3,\)"):
            gae(zeros, zeros[:, None], mask, 1.0, 1.0)
        with pytest.raises(ValueError, match=r"must be bool, got torch\.float32"):
            gae(zeros, zeros, mask.float(), 1.0, 1.0)
        with pytest.raises(ValueError, match=r"gamma=1\.5"):
            gae(zeros, zeros, mask, 1.5, 1.0)
        with pytest.raises(ValueError, match="2 lengths with sum 4"):
            gae_packed(zeros, zeros, mask, [2, 2], 1.0, 1.0)


class TestDiscountedReturns:
    def test_worked_by_hand(self) -> None:
        # gamma 0.5. Sequence 0: 4, 2 + 0.5 * 4 = 4, 1 + 0.5 * 4 = 3, over an observation; sequence 1: 6.
        rewards = torch.tensor([1.0, 2.0, math.nan, 4.0, 6.0])
        found = discounted_returns(rewards, torch.tensor([T, T, F, T, T]), [4, 1], gamma=0.5)
        assert found.tolist() == [3.0, 4.0, 0.0, 4.0, 6.0]

    def test_is_the_score_less_the_kl_still_to_come(self) -> None:
        """REINFORCE++'s A_t = r - beta * sum_{i >= t} KL_i."""
        kl, mask = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([T, T, T])
        found = discounted_returns(token_rewards(2.0, kl, mask, kl_coef=0.1), mask, [3], gamma=1.0)
        torch.testing.assert_close(found, torch.tensor([2 - 0.175, 2 - 0.125, 2 - 0.1]))


class TestGroups:
    def test_grpo_worked_by_hand(self) -> None:
        # Group a: 1, 2, 6: mean 3, deviations -2, -1, 3, variance (4 + 1 + 9) / 2 = 7, std 2.6457513.
        # Group b: 4, 4: std 0 -> 0. Group c: one answer: mean 0, std 1.
        advantages = grpo([1.0, 4.0, 2.0, 5.0, 6.0, 4.0], ["a", "b", "a", "c", "a", "b"])
        assert advantages == pytest.approx([-0.7559289, 0.0, -0.3779645, 5.0, 1.1338934, 0.0], rel=2e-6)

    def test_eps_is_added_to_the_standard_deviation(self) -> None:
        # 0, 2: mean 1, std sqrt(2) = 1.4142136; 1 / 1.9142136 = 0.5224077
        assert grpo([0.0, 2.0], [0, 0], eps=0.5) == pytest.approx([-0.5224077, 0.5224077])

    def test_dr_grpo_only_subtracts_the_mean(self) -> None:
        scores, groups = [1.0, 4.0, 2.0, 5.0, 6.0, 4.0], ["a", "b", "a", "c", "a", "b"]
        assert dr_grpo(scores, groups) == [-2.0, 0.0, -1.0, 5.0, 3.0, 0.0]

    def test_rloo_worked_by_hand(self) -> None:
        # Group a: 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5. Group c: no other answer.
        assert rloo([1.0, 2.0, 5.0, 6.0], ["a", "a", "c", "a"]) == pytest.approx([-3.0, -1.5, 5.0, 4.5])

    def test_opo_worked_by_hand(self) -> None:
        # Group a: baseline (2 * 1 + 1 * 4 + 5 * 2) / 8 = 2. Group c: one answer. Group d: no loss token at all.
        scores, groups = [1.0, 4.0, 5.0, 2.0, 1.0, 0.0], ["a", "a", "c", "a", "d", "d"]
        assert opo(scores, groups, [2, 1, 9, 5, 0, 0]) == [-1.0, 2.0, 5.0, 0.0, 1.0, 0.0]

    def test_gpg_worked_by_hand(self) -> None:
        # Six answers, three of them (a) in a group that teaches: alpha = 2. Means: a 3, b 4. Group c: a score of 0.
        assert gpg([1.0, 4.0, 2.0, 0.0, 6.0, 4.0], ["a", "b", "a", "c", "a", "b"]) == [-4.0, 0.0, -2.0, 0.0, 6.0, 0.0]
        # Group c alone is compared with 0, so it teaches: alpha = 6 / 4.
        assert gpg([1.0, 4.0, 2.0, 5.0, 6.0, 4.0], ["a", "b", "a", "c", "a", "b"]) == [-3.0, 0.0, -1.5, 7.5, 4.5, 0.0]

    def test_grpo_passk_worked_by_hand(self) -> None:
        # Group a: 1, 2, 6: 6 - 2 = 4, std sqrt(7) = 2.6457513: 1.5118579. Group b: a tie. Group c: one answer.
        scores, groups = [1.0, 4.0, 2.0, 5.0, 6.0, 4.0], ["a", "b", "a", "c", "a", "b"]
        assert grpo_passk(scores, groups) == pytest.approx([0.0, 0.0, 0.0, 5.0, 1.5118579, 0.0], rel=2e-6)
        assert grpo_passk(scores, groups, normalise_by_std=False) == [0.0, 0.0, 0.0, 5.0, 4.0, 0.0]

    @given(answers=answers)
    def test_grpo_passk_is_what_the_group_would_lose_without_the_answer(self, answers: list[tuple[float, int]]) -> None:
        advantages = grpo_passk([s for s, _ in answers], [g for _, g in answers], normalise_by_std=False)
        for i, (advantage, (own, group)) in enumerate(zip(advantages, answers, strict=True)):
            others = [s for j, (s, g) in enumerate(answers) if g == group and j != i]
            assert advantage == pytest.approx(max([own, *others]) - max(others) if others else own, abs=1e-12)

    @given(answers=answers, data=st.data())
    def test_opo_sums_to_zero_weighted_by_length_and_is_dr_grpo_for_equal_lengths(
        self, answers: list[tuple[float, int]], data: st.DataObject
    ) -> None:
        scores, groups = [s for s, _ in answers], [g for _, g in answers]
        lengths = data.draw(st.lists(st.integers(1, 50), min_size=len(answers), max_size=len(answers)))
        advantages = opo(scores, groups, lengths)
        for group in set(groups):
            own = [(n, a) for n, a, g in zip(lengths, advantages, groups, strict=True) if g == group]
            assert len(own) == 1 or math.fsum(n * a for n, a in own) == pytest.approx(0.0, abs=1e-9)
        assert opo(scores, groups, [7] * len(scores)) == pytest.approx(dr_grpo(scores, groups), abs=1e-12)

    @given(answers=answers)
    def test_gpg_sums_to_what_dr_grpo_gives_over_the_groups_that_teach(self, answers: list[tuple[float, int]]) -> None:
        """The mean over all answers is dr_grpo's mean over those in a group whose scores differ."""
        scores, groups = [float(round(s)) for s, _ in answers], [g for _, g in answers]
        plain, found = dr_grpo(scores, groups), gpg(scores, groups)
        teaching = {g for a, g in zip(plain, groups, strict=True) if abs(a) > 1e-9}
        chosen = [abs(a) for a, g in zip(plain, groups, strict=True) if g in teaching]
        mean = math.fsum(chosen) / len(chosen) if chosen else 0.0
        assert math.fsum(abs(a) for a in found) / len(found) == pytest.approx(mean, abs=1e-9)

    @pytest.mark.parametrize("name", GROUP_ADVANTAGES)
    @pytest.mark.parametrize("normalise_by_std", [True, False])
    def test_equal_scores_teach_nothing_and_one_answer_is_its_score(self, name: str, normalise_by_std: bool) -> None:
        scores, groups = [0.1, 0.1, 0.1, 2.5, 0.7, 0.7], ["a", "a", "a", "b", "c", "c"]
        found = GROUP_ADVANTAGES[name](scores, groups, [1, 5, 2, 4, 3, 3], normalise_by_std)
        alpha = 6.0 if name == "gpg" else 1.0  # of six answers one teaches
        assert found == pytest.approx([0.0, 0.0, 0.0, 2.5 * alpha, 0.0, 0.0], rel=2e-6, abs=1e-9)

    @pytest.mark.parametrize("name", [name for name in GROUP_ADVANTAGES if name != "gpg"])
    @given(answers=answers)
    def test_a_batch_is_its_groups_one_by_one(self, name: str, answers: list[tuple[float, int]]) -> None:
        """gpg alone looks at the whole batch."""
        scores, groups, lengths = [s for s, _ in answers], [g for _, g in answers], [i + 1 for i in range(len(answers))]
        whole = GROUP_ADVANTAGES[name](scores, groups, lengths, True)
        for group in set(groups):
            own = [i for i, g in enumerate(groups) if g == group]
            split = GROUP_ADVANTAGES[name]([scores[i] for i in own], [0] * len(own), [lengths[i] for i in own], True)
            assert split == [whole[i] for i in own]

    @pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "reinforce_pp_baseline"])
    @given(answers=answers)
    def test_a_group_sums_to_zero(self, name: str, answers: list[tuple[float, int]]) -> None:
        scores, groups = [s for s, _ in answers], [g for _, g in answers]
        advantages = GROUP_ADVANTAGES[name](scores, groups, [1] * len(scores), True)
        for group in set(groups):
            if groups.count(group) > 1:
                total = math.fsum(a for a, g in zip(advantages, groups, strict=True) if g == group)
                assert total == pytest.approx(0.0, abs=1e-6)

    @given(answers=answers)
    def test_rloo_is_leave_one_out(self, answers: list[tuple[float, int]]) -> None:
        for i, (advantage, (own, group)) in enumerate(
            zip(rloo([s for s, _ in answers], [g for _, g in answers]), answers, strict=True)
        ):
            others = [s for j, (s, g) in enumerate(answers) if g == group and j != i]
            baseline = sum(others) / len(others) if others else 0.0
            assert advantage == pytest.approx(own - baseline, abs=1e-9)

    @given(answers=answers, scale=st.floats(0.5, 20.0), shift=st.floats(-5.0, 5.0))
    def test_grpo_ignores_scale_and_shift(self, answers: list[tuple[float, int]], scale: float, shift: float) -> None:
        # Scores on a grid, so that a group is either constant or far from it.
        scores, groups = [float(round(s)) for s, _ in answers] + [0.0], [0] * (len(answers) + 1)
        moved = grpo([scale * s + shift for s in scores], groups)
        assert moved == pytest.approx(grpo(scores, groups), abs=1e-4)

    def test_wrong_arguments_are_refused(self) -> None:
        for function in GROUP_ADVANTAGES.values():
            with pytest.raises(ValueError, match="2 scores but 1 group"):
                function([1.0, 2.0], ["a"], [1, 1], True)
            with pytest.raises(ValueError, match="answer 1 in group 'b' is nan"):
                function([1.0, math.nan], ["a", "b"], [1, 1], True)
            assert function([], [], [], True) == []
        with pytest.raises(ValueError, match="2 scores but 1 lengths"):
            opo([1.0, 2.0], ["a", "a"], [1])


class TestReMax:
    def test_worked_by_hand(self) -> None:
        """Two prompts whose greedy answers scored 1 and 0.25; the answers of one may lie anywhere."""
        assert remax([1.0, 0.0, 0.0, 2.0], [1.0, 0.25, 1.0, 0.25]) == [0.0, -0.25, -1.0, 1.75]
        assert remax([], []) == []

    def test_one_answer_is_compared_too(self) -> None:
        """No other answer to the prompt is looked at: what an answer gets is the same alone and among others."""
        alone = [remax([score], [0.5]) for score in (0.0, 0.5, 1.0)]
        assert alone == [[-0.5], [0.0], [0.5]]
        assert remax([0.0, 0.5, 1.0], [0.5] * 3) == [-0.5, 0.0, 0.5]

    @given(
        st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=3), st.lists(st.floats(-5.0, 5.0), min_size=3, max_size=3)
    )
    def test_the_policy_gradient_is_the_same_in_expectation(self, logits: list[float], scores: list[float]) -> None:
        """Exactly, over the three answers that there are: sum of p (r - b) grad log p is that of p r grad log p."""
        theta = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        log_p = theta.log_softmax(0)
        greedy = scores[int(theta.argmax())]
        gradients = []
        for advantages in (scores, remax(scores, [greedy] * 3)):
            weights = log_p.exp().detach() * torch.tensor(advantages, dtype=torch.float64)
            gradients.append(torch.autograd.grad((weights * log_p).sum(), theta, retain_graph=True)[0])
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=0)

    def test_wrong_arguments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 scores but 1 baselines"):
            remax([1.0, 2.0], [1.0])
        with pytest.raises(ValueError, match=r"answer 1 is nan, of the greedy answer 2\.0"):
            remax([1.0, math.nan], [1.0, 2.0])
        with pytest.raises(ValueError, match=r"answer 0 is 1\.0, of the greedy answer inf"):
            remax([1.0], [math.inf])


class TestWhitening:
    def test_moments_worked_by_hand(self) -> None:
        # 1, 2, 6: sum 9, squares 1 + 4 + 36 = 41, mean 3, variance (41 - 9 * 3) / 2 = 7
        moments = Moments.of(torch.tensor([1.0, math.nan, 2.0, 6.0]), torch.tensor([T, F, T, T]))
        assert moments == Moments(3, 9.0, 41.0)
        assert (moments.mean, moments.variance) == (3.0, 7.0)
        assert moments.std == pytest.approx(2.6457513)

    def test_whiten_worked_by_hand(self) -> None:
        # (x - 3) / sqrt(7): -0.7559289, -0.3779645, 1.1338934; without the shift 3 more.
        values, mask = torch.tensor([1.0, math.nan, 2.0, 6.0]), torch.tensor([T, F, T, T])
        moments = Moments.of(values, mask)
        expected = torch.tensor([-0.7559289, 0.0, -0.3779645, 1.1338934])
        torch.testing.assert_close(whiten(values, mask, moments), expected)
        torch.testing.assert_close(
            whiten(values, mask, moments, shift_mean=False), torch.where(mask, expected + 3.0, 0.0)
        )

    def test_eps_is_added_to_the_variance(self) -> None:
        # 0, 2: mean 1, variance 2; 1 / sqrt(2 + 2) = 0.5
        values, mask = torch.tensor([0.0, 2.0]), torch.tensor([T, T])
        assert whiten(values, mask, Moments.of(values, mask), eps=2.0).tolist() == [-0.5, 0.5]

    @given(st.lists(st.tuples(st.floats(-5.0, 5.0), st.booleans(), st.integers(0, 2)), max_size=30))
    def test_ranks_that_add_their_moments_whiten_as_one(self, tokens: list[tuple[float, bool, int]]) -> None:
        values = torch.tensor([v for v, _, _ in tokens], dtype=torch.float64)
        mask = torch.tensor([m for _, m, _ in tokens], dtype=torch.bool)
        rank = torch.tensor([r for _, _, r in tokens], dtype=torch.long)
        parts = [Moments.of(values[rank == r], mask[rank == r]) for r in range(3)]
        added, whole = parts[0] + parts[1] + parts[2], Moments.of(values, mask)
        assert added.count == whole.count == int(mask.sum())
        assert added.mean == pytest.approx(whole.mean, abs=1e-12)
        assert added.variance == pytest.approx(whole.variance, abs=1e-10)
        if whole.count > 1:
            assert whole.variance == pytest.approx(float(values[mask].var()), abs=1e-10)
            if whole.variance > 1e-3:
                whitened = whiten(values, mask, added)[mask]
                assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-9)
                assert float(whitened.std()) == pytest.approx(1.0, abs=1e-4)

    def test_constant_or_lonely_values_become_zero(self) -> None:
        for size in (1, 7):
            values, mask = torch.full((size,), 0.1), torch.ones(size, dtype=torch.bool)
            moments = Moments.of(values, mask)
            assert moments.variance == pytest.approx(0.0, abs=1e-15)
            assert whiten(values, mask, moments).abs().max() < 1e-3

    def test_nothing_at_all(self) -> None:
        values, mask = torch.tensor([1.0]), torch.tensor([F])
        moments = Moments.of(values, mask)
        assert (moments.count, moments.mean, moments.std) == (0, 0.0, 0.0)
        assert whiten(values, mask, moments).tolist() == [0.0]

    def test_sums_are_in_float64(self) -> None:
        # In float32, 1e4^2 * 1000 leaves no room for a variance of 1.
        values = torch.tensor([9999.0, 10001.0]).repeat(500)
        # Deviations +-1 from 10000: variance 1000 / 999
        assert Moments.of(values, torch.ones(1000, dtype=torch.bool)).variance == pytest.approx(1.001001, rel=1e-5)

    def test_not_a_number_is_not_hidden(self) -> None:
        values, mask = torch.tensor([1.0, math.nan]), torch.tensor([T, T])
        assert math.isnan(Moments.of(values, mask).variance)
        assert whiten(values, mask, Moments.of(values, mask)).isnan().all()

    def test_wrong_arguments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="must be bool"):
            Moments.of(torch.zeros(2), torch.ones(2))
        with pytest.raises(ValueError, match=r"values \(2,\) and its mask \(1,\)"):
            whiten(torch.zeros(2), torch.tensor([T]), Moments(1, 0.0, 0.0))
