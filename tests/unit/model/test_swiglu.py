from __future__ import annotations

import pytest
import torch

from megarl.model.swiglu import compute, release_until_backward, swiglu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", [(5, 1, 2 * 48), (3, 2 * 1027), (7, 2 * 2048), (0, 2 * 8)])
def test_value_and_gradient_are_the_formulas(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = (3 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    up = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(device, dtype)
    found = swiglu(gate_up)
    (gradient,) = torch.autograd.grad(found, gate_up, up)
    wide = gate_up.detach().double().requires_grad_()
    wanted = exact(wide)
    (wanted_gradient,) = torch.autograd.grad(wanted, wide, up.double())
    assert found.dtype == gradient.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=tolerance, atol=tolerance)


def test_the_result_is_dropped_and_made_again() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(4, 12, generator=generator, requires_grad=True)
    weight = torch.randn(6, 3, generator=generator, requires_grad=True)

    def gradients(releases: bool) -> tuple[torch.Tensor, ...]:
        activated = swiglu(gate_up)
        output = activated @ weight
        if releases:
            release_until_backward(activated, gate_up, output)
            assert activated.untyped_storage().nbytes() == 0
        found = torch.autograd.grad(output.square().sum(), (gate_up, weight))
        assert activated.equal(compute(gate_up.detach()))
        return found

    for kept, made_again in zip(gradients(False), gradients(True), strict=True):
        assert made_again.equal(kept)
