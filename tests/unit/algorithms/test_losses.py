from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    cispo_loss,
    gpg_loss,
    gspo_loss,
    policy_loss,
    sapo_loss,
    value_loss,
)


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


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


OPTIONS: dict[str, dict[str, float | None]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"clip_low": 1.0, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "gpg": {},
}


def loss_of(name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor | None = None) -> PolicyLoss:
    """All tokens are one sequence."""
    whole = {"sequence_log_ratio": (logprobs - old).mean().expand_as(old)} if name == "gspo" else {}
    return POLICY_LOSSES[name](logprobs, old, advantages, importance_weights=weights, **OPTIONS[name], **whole)


def with_constants_held(name: str, at: Tensor, old: Tensor, advantages: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss as a function whose numerical derivative is its gradient: what it stops the gradient of is held as it is
    at the point `at`. ppo, sapo and gpg stop nothing."""
    if name == "gspo":
        ratio = (at - old).mean().exp()

        def held(x: Tensor) -> Tensor:
            own = ratio * (x - at).exp()
            return torch.maximum(-advantages * own, -advantages * own.clamp(0.8, 1.3))

        return held
    if name == "cispo":
        weight = (at - old).exp().clamp(0.0, 1.3)
        return lambda x: -weight * advantages * x
    return lambda x: loss_of(name, x, old, advantages).loss


@pytest.mark.parametrize("name", POLICY_LOSSES)
class TestEveryPolicyLoss:
    @pytest.mark.parametrize("shift", [-0.5, 0.0, 0.5])
    def test_gradcheck(self, name: str, shift: float) -> None:
        """With and without importance weights, on both sides of every clip, for both signs of A."""
        old = torch.linspace(-3.0, -1.0, 8, dtype=torch.float64)
        logprobs = (old + shift + double(0.05, 0.9, -0.9, 0.1, 0.05, 0.9, -0.9, 2.0)).requires_grad_()
        advantages, weights = double(1.0, 1.0, 0.5, 0.0, -1.0, -1.0, -0.3, -1.0), double(1, 0.5, 2, 1, 0, 1, 3, 1)
        held = with_constants_held(name, logprobs.detach().clone(), old, advantages)  # gradcheck writes in place
        for factor in (None, weights):
            scale = 1.0 if factor is None else factor
            assert torch.autograd.gradcheck(lambda x, scale=scale: scale * held(x), (logprobs,))
            found, wanted = loss_of(name, logprobs, old, advantages, factor).loss, scale * held(logprobs)
            torch.testing.assert_close(found, wanted)
            assert gradient(found, logprobs) == pytest.approx(gradient(wanted, logprobs), abs=1e-12)

    def test_on_policy_it_is_the_policy_gradient(self, name: str) -> None:
        """-A for each token: at ratio 1 nothing is clipped, and every weight is 1."""
        logprobs = double(-1.0, -2.0, -0.5).requires_grad_()
        result = loss_of(name, logprobs, logprobs.detach(), double(0.5, -3.0, 0.0))
        assert gradient(result.loss, logprobs) == [-0.5, 3.0, 0.0]
        assert result.ratio.tolist() == [1.0, 1.0, 1.0]
        assert result.kl.tolist() == [0.0, 0.0, 0.0]
        assert not result.clipped.any()
        assert not result.clipped_low.any()

    def test_importance_weights_scale_loss_and_gradient_token_by_token(self, name: str) -> None:
        logprobs = double(0.1, -0.1, 2.0).requires_grad_()
        old, advantages = double(0.0, 0.05, 1.0), double(1.0, -2.0, 0.5)
        weights = double(0.5, 2.0, 0.0).requires_grad_()
        plain = loss_of(name, logprobs, old, advantages)
        weighted = loss_of(name, logprobs, old, advantages, weights)
        constant = weights.detach()
        torch.testing.assert_close(weighted.loss, constant * plain.loss)
        slopes = constant * double(*gradient(plain.loss, logprobs))
        assert gradient(weighted.loss, logprobs) == pytest.approx(slopes.tolist())
        for figure in ("clipped", "clipped_low", "kl", "ratio"):
            assert torch.equal(getattr(weighted, figure), getattr(plain, figure))

    def test_only_logprobs_get_a_gradient(self, name: str) -> None:
        logprobs, old, advantages, weights = (torch.full((2,), x, requires_grad=True) for x in (-1.0, -1.1, 0.5, 0.7))
        result = loss_of(name, logprobs, old, advantages, weights)
        result.loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.count_nonzero() == 2
        assert (old.grad, advantages.grad, weights.grad) == (None, None, None)
        assert not any(x.requires_grad for x in result[1:])

    def test_shapes_that_differ_are_refused(self, name: str) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"advantages \(3,\)"):
            loss_of(name, x, x, torch.zeros(3))
        with pytest.raises(ValueError, match=r"importance_weights \(1,\)"):
            loss_of(name, x, x, x, torch.ones(1))

    def test_far_away_all_stays_finite(self, name: str) -> None:
        logprobs = double(0.0, -1000.0).requires_grad_()
        result = loss_of(name, logprobs, double(-1000.0, 0.0), double(-1.0, 1.0))
        assert all(x.isfinite().all() for x in (result.loss, result.kl, result.ratio))
        assert all(math.isfinite(slope) for slope in gradient(result.loss, logprobs))


class TestGSPO:
    def test_worked_by_hand(self) -> None:
        """Log ratios 0.3 and -0.1: their mean is 0.1, so s = exp(0.1) = 1.1051709 at both tokens, and inside 0.8 ..
        1.2. A = 2: each has the loss -2 s = -2.2103418 and, through its own log-prob, the same gradient."""
        old = double(-1.0, -2.0)
        logprobs = double(-0.7, -2.1).requires_grad_()
        log_ratio = double(0.1, 0.1)
        result = gspo_loss(logprobs, old, double(2.0, 2.0), log_ratio, 0.2, 0.2)
        assert result.loss.tolist() == pytest.approx([-2.2103418] * 2)
        assert gradient(result.loss, logprobs) == pytest.approx([-2.2103418] * 2)
        assert result.ratio.tolist() == pytest.approx([1.1051709] * 2)
        assert result.kl.tolist() == pytest.approx([-0.3, 0.1])  # of tokens

    def test_the_whole_sequence_is_clipped_or_none_of_it(self) -> None:
        """s = exp(0.001) is outside 1 - 3e-4 .. 1 + 4e-4, though one token's own ratio is below 1.

        A > 0: -A * 1.0004 and no gradient. A < 0: -A * s, the larger, with its gradient."""
        old, logprobs = torch.zeros(2, dtype=torch.float64), double(0.004, -0.002).requires_grad_()
        up = gspo_loss(logprobs, old, double(1.0, 1.0), double(0.001, 0.001), 3e-4, 4e-4)
        assert up.loss.tolist() == pytest.approx([-1.0004] * 2, rel=1e-12)
        assert (up.clipped.tolist(), gradient(up.loss, logprobs)) == ([True, True], [0.0, 0.0])
        down = gspo_loss(logprobs, old, double(-1.0, -1.0), double(0.001, 0.001), 3e-4, 4e-4)
        assert down.clipped.tolist() == [False, False]
        assert gradient(down.loss, logprobs) == pytest.approx([math.exp(0.001)] * 2, rel=1e-12)

    @pytest.mark.parametrize("advantage", [0.7, -0.7])
    @pytest.mark.parametrize("shift", [-0.3, 0.0, 0.3])
    def test_averaged_over_tokens_it_is_the_sequence_objective(self, advantage: float, shift: float) -> None:
        """Value and gradient of equation 5, -min(s A, clip(s) A), which gradcheck differentiates by itself."""
        old = torch.linspace(-2.0, -0.5, 5, dtype=torch.float64)
        logprobs = (old + double(0.2, -0.1, 0.05, -0.2, 0.1) + shift).requires_grad_()

        def sequence_objective(x: Tensor) -> Tensor:
            ratio = (x - old).mean().exp()
            return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

        assert torch.autograd.gradcheck(sequence_objective, (logprobs,))
        wanted = sequence_objective(logprobs)
        log_ratio = (logprobs - old).mean().expand(5)
        found = gspo_loss(logprobs, old, torch.full_like(old, advantage), log_ratio, 0.2, 0.2).loss.mean()
        assert found.item() == pytest.approx(wanted.item())
        assert gradient(found, logprobs) == pytest.approx(gradient(wanted, logprobs))

    def test_wrong_arguments_are_refused(self) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"sequence_log_ratio \(1,\)"):
            gspo_loss(x, x, x, torch.zeros(1), 0.2, 0.2)
        with pytest.raises(ValueError, match=r"clip_low=1\.5"):
            gspo_loss(x, x, x, x, 1.5, 0.2)


class TestCISPO:
    # ratio, advantage -> weight = clip(ratio, 0.5, 1.3), clipped; slope = -weight * A, loss = slope * logprob
    CASES = (
        (1.1, 2.0, 1.1, False),
        (4.0, 2.0, 1.3, True),
        (4.0, -2.0, 1.3, True),  # clipped whatever the sign of A
        (0.2, 2.0, 0.5, True),
        (0.2, -2.0, 0.5, True),
    )

    def test_worked_by_hand(self) -> None:
        ratio, advantages, weight, clipped = (list(column) for column in zip(*self.CASES, strict=True))
        logprobs = torch.full((5,), -1.5, dtype=torch.float64, requires_grad=True)
        result = cispo_loss(logprobs, logprobs.detach() - double(*ratio).log(), double(*advantages), 0.5, 0.3)
        slope = [-w * a for w, a in zip(weight, advantages, strict=True)]
        assert gradient(result.loss, logprobs) == pytest.approx(slope)  # never 0
        assert result.loss.tolist() == pytest.approx([-1.5 * s for s in slope])
        assert result.clipped.tolist() == clipped
        assert result.ratio.tolist() == pytest.approx(ratio)

    def test_gradcheck_with_the_weight_held(self) -> None:
        old, advantages = torch.linspace(-3.0, -1.0, 5, dtype=torch.float64), double(1.0, -1.0, 0.5, -2.0, 1.0)
        logprobs = (old + double(0.1, -0.1, 2.0, 0.4, -2.0)).requires_grad_()
        weight = (logprobs.detach() - old).exp().clamp(0.0, 1.3)

        def held(x: Tensor) -> Tensor:
            return -weight * advantages * x

        assert torch.autograd.gradcheck(held, (logprobs,))
        found = cispo_loss(logprobs, old, advantages, 1.0, 0.3).loss
        assert torch.equal(found, held(logprobs))
        assert gradient(found, logprobs) == gradient(held(logprobs), logprobs)

    def test_a_clip_low_above_1_is_refused(self) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match="clip_low=10"):
            cispo_loss(x, x, x, 10.0, 0.2)


class TestSAPO:
    def test_worked_by_hand(self) -> None:
        """Ratio 2, tau 1 for A > 0: p = 1 / (1 + exp(-1)) = 0.7310586, loss -4 p = -2.9242343, and the gradient is
        -ratio * 4 p (1 - p) = -2 * 0.7864477 = -1.5728954. tau 2 for A = -1: p = 1 / (1 + exp(-2)) = 0.8807971, loss
        4 / 2 * p = 1.7615942, gradient 2 * 4 p (1 - p) = 2 * 0.4199743 = 0.8399487."""
        logprobs = double(math.log(2.0), math.log(2.0)).requires_grad_()
        result = sapo_loss(logprobs, torch.zeros(2, dtype=torch.float64), double(1.0, -1.0), 1.0, 2.0)
        assert result.loss.tolist() == pytest.approx([-2.9242343, 1.7615942])
        assert gradient(result.loss, logprobs) == pytest.approx([-1.5728954, 0.8399487])
        assert not result.clipped.any()

    def test_the_weight_is_1_at_ratio_1_and_fades_on_both_sides(self) -> None:
        """Of d loss / d ratio; the larger tau fades sooner."""
        log_ratio = double(-3.0, -0.5, 0.0, 0.5, 1.5).requires_grad_()
        weights = []
        for advantage in (1.0, -1.0):
            loss = sapo_loss(
                log_ratio, torch.zeros_like(log_ratio), torch.full_like(log_ratio, advantage), 1.0, 2.0
            ).loss
            slopes = double(*gradient(loss, log_ratio)) / log_ratio.detach().exp()
            weights.append((-slopes / advantage).tolist())
        for low, lower, middle, high, higher in weights:
            assert low < lower < middle > high > higher > 0
            assert middle == pytest.approx(1.0)
        assert all(negative < positive for positive, negative in zip(*weights, strict=True) if positive < 0.99)

    def test_gradcheck(self) -> None:
        log_ratio = double(0.05, 0.9, -0.9, 0.05, 0.9, -0.9, 2.0).requires_grad_()
        advantages = double(1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -0.3)
        old, weights = torch.linspace(-3.0, -1.0, 7, dtype=torch.float64), torch.linspace(0.5, 2.0, 7).double()
        assert torch.autograd.gradcheck(
            lambda x: sapo_loss(old + x, old, advantages, 1.0, 1.05, weights).loss, (log_ratio,)
        )

    def test_a_tau_of_0_is_refused(self) -> None:
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"tau_negative=0\.0"):
            sapo_loss(x, x, x, 1.0, 0.0)


class TestGPG:
    def test_old_logprobs_change_the_metrics_only(self) -> None:
        """-A * logprob: 2 * 1 and -1 * 0.5."""
        logprobs = double(-1.0, -0.5).requires_grad_()
        result = gpg_loss(logprobs, double(-1.5, -3.0), double(2.0, -1.0))
        assert result.loss.tolist() == [2.0, -0.5]
        assert gradient(result.loss, logprobs) == [-2.0, 1.0]
        assert result.kl.tolist() == [-0.5, -2.5]
        assert result.ratio.tolist() == pytest.approx([math.exp(0.5), math.exp(2.5)])

    def test_gradcheck(self) -> None:
        logprobs, advantages = double(-1.0, -0.5, -3.0).requires_grad_(), double(1.0, -2.0, 0.5)
        weights = double(0.5, 1.0, 2.0)
        assert torch.autograd.gradcheck(
            lambda x: gpg_loss(x, torch.zeros(3).double(), advantages, weights).loss, (logprobs,)
        )


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
