import torch

from megarl.engines.residency import Residency, flatten


def made(enabled: bool) -> tuple[Residency, torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = torch.arange(12.0)
    gradients = torch.ones(12)
    moments = torch.full((5,), 2.0)
    parameters = [flat[:4], flat[4:]]
    states = [flat[2:6], moments]  # in float32 the main parameters lie in the parameters' storage
    tensors = {"parameters": lambda: parameters, "gradients": lambda: [gradients], "optimizer": lambda: states}
    return Residency(tensors, enabled=enabled), flat, gradients, moments


def test_content_comes_back_and_views_stay_valid() -> None:
    residency, flat, gradients, moments = made(enabled=True)
    view = flat[4:]
    residency.release()
    assert flat.untyped_storage().nbytes() == gradients.untyped_storage().nbytes() == 0
    assert moments.untyped_storage().nbytes() == 0
    residency.resume()
    assert torch.equal(view, torch.arange(4.0, 12.0))
    assert torch.equal(gradients, torch.zeros(12)), "gradients are not kept"
    assert torch.equal(moments, torch.full((5,), 2.0))


def test_kinds_leave_apart_and_in_any_order() -> None:
    residency, flat, _, moments = made(enabled=True)
    residency.release(["optimizer", "gradients"])
    assert moments.untyped_storage().nbytes() == 0
    assert torch.equal(flat, torch.arange(12.0)), "the optimizer's views of the parameters do not take these along"
    residency.release(["parameters"])
    residency.release(["parameters"])
    residency.resume(["optimizer"])
    assert flat.untyped_storage().nbytes() == 0
    residency.resume()
    residency.resume()
    assert torch.equal(flat, torch.arange(12.0))


def test_resident_restores_what_was_away() -> None:
    residency, flat, _, moments = made(enabled=True)
    residency.release(["optimizer"])
    with residency.resident():
        assert torch.equal(moments, torch.full((5,), 2.0))
        moments.fill_(3.0)
    assert residency.is_released("optimizer")
    assert not residency.is_released("parameters")
    residency.resume()
    assert torch.equal(moments, torch.full((5,), 3.0))
    assert torch.equal(flat, torch.arange(12.0))


def test_disabled_moves_nothing() -> None:
    residency, flat, _, _ = made(enabled=False)
    residency.release()
    assert not residency.is_released("parameters")
    assert torch.equal(flat, torch.arange(12.0))


def test_flatten_puts_parameters_into_one_storage() -> None:
    layer = torch.nn.Linear(3, 2)
    wanted = [parameter.detach().clone() for parameter in layer.parameters()]
    flatten(layer.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}) == 1
    for parameter, before in zip(layer.parameters(), wanted, strict=True):
        assert torch.equal(parameter, before)
