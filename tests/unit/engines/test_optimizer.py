import pytest
import torch

from megarl.engines.optimizer import FusedAdam


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_is_adam(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=generator)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    adam = FusedAdam([ours], adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **settings)
    for _ in range(4):
        gradient = torch.randn(7, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        adam.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_step_is_counted_in_the_group_and_survives_a_state_dict() -> None:
    parameter = torch.ones(3, requires_grad=True)
    adam = FusedAdam([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        adam.step()
    assert adam.param_groups[0]["step"] == 2
    assert sorted(adam.state[parameter]) == ["exp_avg", "exp_avg_sq"]
    again = FusedAdam([torch.ones(3, requires_grad=True)], lr=0.1)
    again.load_state_dict(adam.state_dict())
    assert again.param_groups[0]["step"] == 2


def test_a_parameter_without_gradient_is_left_alone() -> None:
    parameter = torch.ones(3, requires_grad=True)
    adam = FusedAdam([parameter], lr=0.1, weight_decay=0.5)
    adam.step()
    assert torch.equal(parameter, torch.ones(3))
