import pytest
import torch

from megarl.parallel.vocab import fused_logprobs, vocab_parallel_logprobs


def reference(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, by torch."""
    log_softmax = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("vocab_size", [64, 50])
def test_values_and_gradients_are_those_of_log_softmax(vocab_size: int, chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(17, 64, generator=generator)).requires_grad_()
    whole = logits.detach().double().requires_grad_()
    targets = torch.randint(0, vocab_size, (17,), generator=generator)
    up, up_entropy = torch.randn(2, 17, generator=generator)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, None, 0.7, vocab_size, chunk_size, with_entropy=True)
    assert entropy is not None
    (up * logprobs + up_entropy * entropy).sum().backward()
    wanted, wanted_entropy = reference(whole, targets, 0.7, vocab_size)
    (up * wanted + up_entropy * wanted_entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), whole.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.grad[:, vocab_size:], torch.zeros(17, 64 - vocab_size))


@pytest.mark.parametrize("chunk_size", [5, 1000])
@pytest.mark.parametrize("vocab_size", [64, 50])
def test_fused_with_the_output_layer_it_is_the_same(vocab_size: int, chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 12, generator=generator).requires_grad_()
    weight = torch.randn(64, 12, generator=generator).requires_grad_()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    targets = torch.randint(0, vocab_size, (17,), generator=generator)
    up, up_entropy = torch.randn(2, 17, generator=generator)
    logprobs, entropy = fused_logprobs(hidden, weight, targets, None, 0.7, vocab_size, chunk_size, with_entropy=True)
    assert entropy is not None
    (up * logprobs + up_entropy * entropy).sum().backward()
    wanted, wanted_entropy = reference(exact_hidden @ exact_weight.T, targets, 0.7, vocab_size)
    (up * wanted + up_entropy * wanted_entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_the_gradient_of_the_weight_is_added_to_main_grad(device: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(64, 16, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, 50, (40,), generator=generator).to(device)
    there = torch.randn(64, 16, generator=generator).to(device)
    main_grad = there.clone()
    logprobs, _ = fused_logprobs(hidden, weight, targets, None, 0.7, 50, 16, main_grad=main_grad)
    logprobs.sum().backward()
    exact = weight.detach().double().requires_grad_()
    reference(hidden.detach().double() @ exact.T, targets, 0.7, 50)[0].sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # autograd hears of it all the same
    torch.testing.assert_close((main_grad - there).double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_one_of_the_two_outputs_may_have_no_gradient() -> None:
    logits = torch.randn(6, 8, requires_grad=True)
    targets = torch.arange(6)
    for chosen in (0, 1):
        (gradient,) = torch.autograd.grad(
            vocab_parallel_logprobs(logits, targets, None, with_entropy=True)[chosen].sum(), logits
        )
        (wanted,) = torch.autograd.grad(reference(logits, targets, 1.0, 8)[chosen].sum(), logits)
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_large_logits_neither_overflow_nor_lose_digits() -> None:
    logits = torch.tensor([[3e4, 3e4 - 1.0, -3e4]])
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([1]), None, with_entropy=True)
    wanted, wanted_entropy = reference(logits, torch.tensor([1]), 1.0, 3)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-6, atol=0)


def test_the_gradient_has_the_type_of_the_logits() -> None:
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.arange(4), None)
    logprobs.sum().backward()
    assert entropy is None
    assert logprobs.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16


def test_errors() -> None:
    with pytest.raises(ValueError, match="need \\[T, V / tp\\] and \\[T\\]"):
        vocab_parallel_logprobs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.long), None)
    with pytest.raises(ValueError, match="need \\[T, H\\], \\[V / tp, H\\] and \\[T\\]"):
        fused_logprobs(torch.zeros(3, 4), torch.zeros(8, 5), torch.zeros(3, dtype=torch.long), None)
    with pytest.raises(ValueError, match="temperature is 0"):
        vocab_parallel_logprobs(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), None, temperature=0)


@pytest.mark.gpu
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "tolerance"), [(20000, torch.float32, 1e-4), (9999, torch.bfloat16, 4e-2)]
)
def test_the_kernels_compute_the_same(
    vocab_size: int, dtype: torch.dtype, tolerance: float, with_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 32, generator=generator).to("cuda", dtype) for size in (83, 20032))
    targets = torch.randint(0, vocab_size, (83,), generator=generator).cuda()
    up, up_entropy = torch.randn(2, 83, generator=generator).cuda()
    found = []
    for wide in (False, True):
        leaves = [(tensor.double() if wide else tensor).requires_grad_() for tensor in (hidden, weight)]
        if wide:
            logprobs, entropy = reference(leaves[0] @ leaves[1].T, targets, 0.7, vocab_size)
        else:
            logprobs, entropy = fused_logprobs(*leaves, targets, None, 0.7, vocab_size, 32, with_entropy, compiles=True)
        loss = (up * logprobs).sum() + ((up_entropy * entropy).sum() if with_entropy else 0.0)
        found.append((logprobs, entropy if with_entropy else logprobs, *torch.autograd.grad(loss, leaves)))
    for ours, wanted in zip(*found, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.gpu
def test_the_kernels_take_logits_that_are_there() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 5 * torch.randn(17, 10000, generator=generator).cuda()
    targets = torch.randint(0, 9000, (17,), generator=generator).cuda()
    gradients = []
    for compiles in (False, True):
        logits = values.clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(logits, targets, None, 0.7, 9000, 5, True, compiles)
        assert entropy is not None
        (logprobs.square().sum() + entropy.sum()).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
