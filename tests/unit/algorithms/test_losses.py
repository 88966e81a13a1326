from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.losses import policy_loss, value_loss


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    (result,) = torch.autograd.grad(loss.sum(), of)
    return [float(x) for x in result]


class TestPolicyLoss:
    # ratio, advantage -> loss, clipped, clipped_low, d loss / d logprob (= -A * ratio where nothing is clipped)
    CASES = (
        (1.0, 2.0, -2.0, False, False, -2.0),
        (1.1, 2.0, -2.2, False, False, -2.2),  # inside 0.8 .. 1.3
        (1.5, 2.0, -2.6, True, False, 0.0),  # max(-3, -2 * 1.3)
        (0.5, 2.0, -1.0, False, False, -1.0),  # max(-1, -1.6): the way back is never clipped
        (1.5, -2.0, 3.0, False, False, 3.0),  # max(3, 2.6)
        (0.5, -2.0, 1.6, True, False, 0.0),  # max(1, 2 * 0.8)
        (4.0, -2.0, 6.0, False, True, 0.0),  # min(max(8, 2.6), 2 * 3)
        (4.0, 2.0, -2.6, True, False, 0.0),  # no dual clip for a positive advantage
        (1.5, 0.0, 0.0, False, False, 0.0),
    )

    def test_worked_by_hand(self) -> None:
        ratio, advantages, loss, clipped, clipped_low, slope = (
            list(column) for column in zip(*self.CASES, strict=True)
        )
        old = torch.full((len(ratio),), -1.5, dtype=torch.float64)
        logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
        result = policy_loss(logprobs, old, torch.tensor(advantages, dtype=torch.float64), 0.2, 0.3, 3.0)
        assert result.loss.tolist() == pytest.approx(loss)
        assert result.clipped.tolist() == clipped
        assert result.clipped_low.tolist() == clipped_low
        assert result.ratio.tolist() == pytest.approx(ratio)
        assert result.kl.tolist() == pytest.approx([-math.log(r) for r in ratio])  # old - new
        assert gradient(result.loss, logprobs) == pytest.approx(slope)

    def test_without_dual_clip_the_loss_is_unbounded(self) -> None:
        result = policy_loss(torch.tensor([4.0]).log(), torch.zeros(1), torch.tensor([-2.0]), 0.2, 0.2, None)
        assert result.loss.tolist() == pytest.approx([8.0])
        assert result.clipped_low.tolist() == [False]

    def test_log_ratio_is_clamped_at_20(self) -> None:
        # exp(20) = 485165195.4; the gradient beyond is 0 even where nothing else clips.
        logprobs = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
        result = policy_loss(logprobs, torch.tensor([-1000.0], dtype=torch.float64), -torch.ones(1), 0.2, 0.2, None)
        assert result.loss.tolist() == pytest.approx([485165195.4])
        assert result.kl.tolist() == [-20.0]
        assert gradient(result.loss, logprobs) == [0.0]

    def test_importance_weights_scale_the_loss_and_its_gradient_only(self) -> None:
        logprobs = torch.tensor([0.1, -0.1], dtype=torch.float64, requires_grad=True)
        old, advantages = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
        weights = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        plain = policy_loss(logprobs, old, advantages, 0.2, 0.2, 3.0)
        weighted = policy_loss(logprobs, old, advantages, 0.2, 0.2, 3.0, weights)
        # exp(0.1) = 1.1051709, exp(-0.1) = 0.9048374: losses -1.1051709 and 1.8096748, halved and doubled.
        assert weighted.loss.tolist() == pytest.approx([-0.5525855, 3.6193497])
        slopes = gradient(plain.loss, logprobs)
        (weighted_slopes,) = torch.autograd.grad(weighted.loss.sum(), logprobs, retain_graph=True)
        assert weighted_slopes.tolist() == pytest.approx([0.5 * slopes[0], 2.0 * slopes[1]])
        weighted.loss.sum().backward()
        assert weights.grad is None
        assert torch.equal(weighted.kl, plain.kl)
        assert torch.equal(weighted.ratio, plain.ratio)

    def test_only_logprobs_get_a_gradient(self) -> None:
        logprobs, old, advantages = (torch.full((2,), x, requires_grad=True) for x in (-1.0, -1.1, 0.5))
        result = policy_loss(logprobs, old, advantages, 0.2, 0.2, 3.0)
        result.loss.sum().backward()
        assert logprobs.grad is not None
        assert old.grad is None
        assert advantages.grad is None
        assert not any(x.requires_grad for x in (result.clipped, result.clipped_low, result.kl, result.ratio))

    def test_on_policy_it_is_the_policy_gradient(self) -> None:
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        result = policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -3.0]), 0.2, 0.2, 3.0)
        assert gradient(result.loss, logprobs) == [-0.5, 3.0]
        assert not result.clipped.any()
        assert not result.clipped_low.any()

    @pytest.mark.parametrize("dual_clip", [None, 1.5])
    def test_gradcheck(self, dual_clip: float | None) -> None:
        log_ratio = torch.tensor([0.05, 0.9, -0.9, 0.05, 0.9, -0.9, 2.0], dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -0.3], dtype=torch.float64)
        weights = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
        old = torch.linspace(-3.0, -1.0, 7, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda x: policy_loss(old + x, old, advantages, 0.2, 0.3, dual_clip, weights).loss, (log_ratio,)
        )

    @given(st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(-3.0, 3.0)), min_size=1, max_size=10))
    def test_the_gradient_vanishes_exactly_where_a_flag_says_clipped(self, tokens: list[tuple[float, float]]) -> None:
        logprobs = torch.tensor([x for x, _ in tokens], dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([a for _, a in tokens], dtype=torch.float64)
        result = policy_loss(logprobs, torch.zeros_like(advantages), advantages, 0.2, 0.3, 2.0)
        slopes = gradient(result.loss, logprobs)
        for i, (log_ratio, advantage) in enumerate(tokens):
            ratio = math.exp(log_ratio)
            if min(abs(ratio - edge) for edge in (0.8, 1.3, 2.0)) < 1e-9 or abs(advantage) < 1e-9:
                continue
            up, down = advantage > 0 and ratio > 1.3, advantage < 0 and ratio < 0.8
            low = advantage < 0 and ratio > 2.0
            assert (bool(result.clipped[i]), bool(result.clipped_low[i])) == (up or down, low)
            assert slopes[i] == pytest.approx(0.0 if up or down or low else -advantage * ratio)

    def test_wrong_arguments_are_refused(self) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"logprobs \(2,\), old_logprobs \(2,\), advantages \(2, 1\)"):
            policy_loss(x, x, x[:, None], 0.2, 0.2, 3.0)
        with pytest.raises(ValueError, match=r"importance_weights \(1,\)"):
            policy_loss(x, x, x, 0.2, 0.2, 3.0, torch.ones(1))
        with pytest.raises(ValueError, match=r"dual_clip .* got 1\.0"):
            policy_loss(x, x, x, 0.2, 0.2, 1.0)
        with pytest.raises(ValueError, match=r"clip_low=-0\.1"):
            policy_loss(x, x, x, -0.1, 0.2, None)
        with pytest.raises(ValueError, match=r"clip_high=-0\.1"):
            policy_loss(x, x, x, 0.1, -0.1, None)


class TestValueLoss:
    # V, V_old, R, clip 0.5 -> loss, clipped, slope
    CASES = (
        (1.2, 1.0, 3.0, 1.62, False, -1.8),  # inside: 0.5 * 1.8^2
        (2.0, 1.0, 3.0, 1.125, True, 0.0),  # clipped to 1.5: 0.5 * max(1, 2.25)
        (2.0, 1.0, 0.0, 2.0, False, 2.0),  # clipped to 1.5: 0.5 * max(4, 2.25)
        (0.0, 1.0, -1.0, 1.125, True, 0.0),  # clipped to 0.5: 0.5 * max(1, 2.25)
    )

    def test_worked_by_hand(self) -> None:
        v, old, returns, loss, clipped, slope = (list(column) for column in zip(*self.CASES, strict=True))
        values = torch.tensor(v, requires_grad=True)
        result = value_loss(values, torch.tensor(old), torch.tensor(returns), clip=0.5)
        assert result.loss.tolist() == pytest.approx(loss)
        assert result.clipped.tolist() == clipped
        assert gradient(result.loss, values) == pytest.approx(slope)

    def test_without_clip_it_is_half_the_squared_error(self) -> None:
        result = value_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, -1.0]), clip=None)
        assert result.loss.tolist() == [0.5, 0.5]
        assert result.clipped.tolist() == [False, False]

    @pytest.mark.parametrize("clip", [None, 0.5])
    def test_gradcheck(self, clip: float | None) -> None:
        values = torch.tensor([1.2, 2.0, 2.1, 0.1], dtype=torch.float64, requires_grad=True)
        returns = torch.tensor([3.0, 3.0, 0.0, -1.0], dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda x: value_loss(x, torch.ones_like(returns), returns, clip).loss, (values,)
        )

    def test_only_values_get_a_gradient(self) -> None:
        values, old, returns = (torch.full((2,), x, requires_grad=True) for x in (1.0, 0.9, 0.5))
        value_loss(values, old, returns, clip=0.5).loss.sum().backward()
        assert values.grad is not None
        assert old.grad is None
        assert returns.grad is None

    @given(st.lists(st.tuples(*[st.floats(-3.0, 3.0)] * 3), min_size=1, max_size=10))
    def test_clipping_never_lowers_the_loss(self, tokens: list[tuple[float, float, float]]) -> None:
        values, old, returns = (torch.tensor(column) for column in zip(*tokens, strict=True))
        clipped, plain = value_loss(values, old, returns, 0.5), value_loss(values, old, returns, None)
        assert (clipped.loss >= plain.loss).all()
        assert torch.equal(clipped.loss > plain.loss, clipped.clipped)

    def test_wrong_arguments_are_refused(self) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"returns \(3,\)"):
            value_loss(x, x, torch.zeros(3), 0.5)
        with pytest.raises(ValueError, match="got 0"):
            value_loss(x, x, x, 0.0)
