from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl import (
    KL_ESTIMATORS,
    VERL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_estimate,
    update,
)

logprob = st.floats(-30.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # log p = -1, log q = -2: d = 1. And log p = -2, log q = -1: d = -1.
    [
        ("k1", [1.0, -1.0]),
        ("abs", [1.0, 1.0]),
        ("k2", [0.5, 0.5]),
        ("k3", [0.3678794, 0.7182818]),  # exp(-1) - 1 + 1 = 0.3678794; exp(1) - 1 - 1 = 0.7182818
        ("k1+", [1.0, -1.0]),
        ("k3+", [0.3678794, 0.7182818]),
    ],
)
def test_estimates_worked_by_hand(kind: str, expected: list[float]) -> None:
    estimate = kl_estimate(kind, torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    torch.testing.assert_close(estimate, torch.tensor(expected))


def test_k3_is_clamped_as_in_verl() -> None:
    # log(q/p) = 5: exp(5) - 6 = 142.4 -> 10. log(q/p) = -50 -> -20: exp(-20) - 1 + 20 = 19 -> 10.
    # log(q/p) = 200 -> 20: no overflow, 10.
    logprobs = torch.tensor([-6.0, 0.0, -200.0], requires_grad=True)
    estimate = kl_estimate("k3", logprobs, torch.tensor([-1.0, -50.0, 0.0]))
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_k3_keeps_its_digits_near_zero() -> None:
    # x = 1e-3: x^2 / 2 + x^3 / 6 = 5.00167e-7. In float32, exp(x) - x - 1 has an error of 1e-7, a fifth of that.
    estimate = kl_estimate("k3", torch.tensor([-1e-3]), torch.tensor([0.0]))
    assert float(estimate) == pytest.approx(5.00167e-7, rel=2e-3)


@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20))
def test_all_but_k1_are_never_negative_and_zero_at_equality(pairs: list[tuple[float, float]]) -> None:
    policy, reference = (torch.tensor(column) for column in zip(*pairs, strict=True))
    for kind in KL_ESTIMATORS:
        if kind not in ("k1", "k1+"):
            assert (kl_estimate(kind, policy, reference) >= 0).all(), kind
        assert (kl_estimate(kind, policy, policy) == 0).all(), kind


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl() -> None:
    # Exact expectations over a vocabulary of three: p = softmax(logits), q = (0.5, 0.3, 0.2).
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    log_p, log_q = logits.log_softmax(0), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    kl = (log_p.exp() * (log_p - log_q)).sum()
    probs = log_p.exp().detach()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((probs * kl_estimate(kind, log_p, log_q)).sum(), kl)
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (k1_gradient,) = torch.autograd.grad((probs * kl_estimate("k1", log_p, log_q)).sum(), logits, retain_graph=True)
    (k2_gradient,) = torch.autograd.grad((probs * kl_estimate("k2", log_p, log_q)).sum(), logits)
    torch.testing.assert_close(k2_gradient, kl_gradient)
    torch.testing.assert_close(k1_gradient, torch.zeros(3, dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_the_straight_through_forms_have_the_gradient_of_k2(kind: str) -> None:
    # d = log p - log q: 1, -1, and -15, where k3 reaches its clamp and has no gradient of its own.
    logprobs = torch.tensor([-1.0, -2.0, -16.0], requires_grad=True)
    estimate = kl_estimate(kind, logprobs, torch.tensor([-2.0, -1.0, -1.0]))
    assert torch.equal(estimate.detach(), kl_estimate(kind[:-1], logprobs.detach(), torch.tensor([-2.0, -1.0, -1.0])))
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, -1.0, -15.0]


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_gradcheck_of_the_straight_through_forms(kind: str) -> None:
    """Their gradient is the numerical one of (log p - log q)^2 / 2, also beyond the clamps of k3."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.3, -1.1, -9.5, -0.1], dtype=torch.float64)

    def square(x: torch.Tensor) -> torch.Tensor:
        return (x - reference) ** 2 / 2

    assert torch.autograd.gradcheck(square, (logprobs,))
    (found,) = torch.autograd.grad(kl_estimate(kind, logprobs, reference).sum(), logprobs)
    (wanted,) = torch.autograd.grad(square(logprobs).sum(), logprobs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_the_straight_through_forms_are_unbiased_in_value_and_gradient(kind: str) -> None:
    """Exact expectations over a vocabulary of three; the sampling probabilities are constants, as in a batch."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    log_p, log_q = logits.log_softmax(0), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    kl = (log_p.exp() * (log_p - log_q)).sum()
    expected = (log_p.exp().detach() * kl_estimate(kind, log_p, log_q)).sum()
    torch.testing.assert_close(expected, kl)
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (kl_gradient,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(gradient, kl_gradient)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_gradient_flows_through_logprobs_alone(kind: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.3, -1.1, -2.5], dtype=torch.float64, requires_grad=True)
    if not kind.endswith("+"):  # whose gradient is not that of its value
        assert torch.autograd.gradcheck(lambda x: kl_estimate(kind, x, reference.detach()), (logprobs,))
    kl_estimate(kind, logprobs, reference).sum().backward()
    assert reference.grad is None


@pytest.mark.parametrize("verl_name", VERL_ESTIMATORS)
def test_a_name_of_verls_is_answered_with_ours(verl_name: str) -> None:
    with pytest.raises(ValueError, match=f"verl's '{verl_name}' is '{VERL_ESTIMATORS[verl_name]}' here"):
        kl_estimate(verl_name, torch.zeros(1), torch.zeros(1))
    assert VERL_ESTIMATORS[verl_name] in KL_ESTIMATORS


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\).*\(2, 1\)"):
        kl_estimate("k1", torch.zeros(2), torch.zeros(2, 1))


def test_fixed_controller_stays() -> None:
    controller = FixedKLController(0.1)
    assert update(controller, observed_kl=100.0, num_steps=1_000) == controller


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (12.0, 0.204),  # 12/6 - 1 = 1 -> 0.2; 0.2 * (1 + 0.2 * 1000/10000) = 0.2 * 1.02
        (6.6, 0.202),  # 0.1; 0.2 * 1.01
        (6.0, 0.2),
        (5.4, 0.198),  # -0.1; 0.2 * 0.99
        (-3.0, 0.196),  # -1.5 -> -0.2; 0.2 * 0.98
        (math.inf, 0.204),
        (math.nan, 0.2),
    ],
)
def test_adaptive_controller_moves_towards_its_target(observed: float, expected: float) -> None:
    before = AdaptiveKLController(coef=0.2, target=6.0, horizon=10_000)
    after = update(before, observed_kl=observed, num_steps=1_000)
    assert after.coef == pytest.approx(expected)
    assert (after.target, after.horizon, before.coef) == (6.0, 10_000, 0.2)


def test_controllers_refuse_senseless_numbers() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        FixedKLController(-1.0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        AdaptiveKLController(-1.0, target=1.0, horizon=1.0)
    with pytest.raises(ValueError, match="horizon=0"):
        AdaptiveKLController(0.1, target=6.0, horizon=0.0)
    with pytest.raises(ValueError, match="target=0"):
        AdaptiveKLController(0.1, target=0.0, horizon=1.0)
    with pytest.raises(ValueError, match="num_steps"):
        update(FixedKLController(0.1), 1.0, -1)
