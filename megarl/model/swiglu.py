"""silu(gate) x up in one pass over memory each way, and a feed-forward layer that does not keep its result.

The result is a fifth of what a dense layer saves for backward, and one cheap pass makes it again. So its memory is
given back as soon as the second product has read it, and filled again when that product's backward is about to start.
"""

# ruff: noqa: E402
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megarl.compat.megatron_cpu import install

install()

from megatron.core.transformer.mlp import MLP


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 F], the gate's half first, to silu(gate) x up [..., F] in the same type; the arithmetic in float32."""
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return compute(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        return differentiate(gate_up, grad)


def compute(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) x up; into `out` where it is given."""
    if out is None:
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if gate_up.is_cuda:
        from megarl.model import swiglu_triton

        swiglu_triton.compute(gate_up.contiguous(), out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return out.copy_(F.silu(gate) * up)


def differentiate(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of gate_up from that of the result: with s = sigmoid(gate), gate gets
    grad x up x s (1 + gate (1 - s)), and up gets grad x gate x s."""
    found = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    if gate_up.is_cuda:
        from megarl.model import swiglu_triton

        swiglu_triton.differentiate(gate_up.contiguous(), grad.contiguous(), found)
        return found
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad, sigmoid = grad.float(), torch.sigmoid(gate)
    of_gate, of_up = found.chunk(2, dim=-1)
    of_gate.copy_(grad * up * sigmoid * (1 + gate * (1 - sigmoid)))
    of_up.copy_(grad * gate * sigmoid)
    return found


class GatedMLP(MLP):
    """Megatron's dense MLP without biases, its activation computed by `swiglu` and, with `recomputes`, not kept."""

    recomputes = False

    def forward(self, hidden_states: torch.Tensor, *unused: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """[T (/ tensor), 1, H] to (the same shape, no bias)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        activated = swiglu(gate_up)
        output, _ = self.linear_fc2(activated)
        if self.recomputes and output.requires_grad:
            release_until_backward(activated, gate_up, output)
        return output, None


def release_until_backward(activated: torch.Tensor, gate_up: torch.Tensor, output: torch.Tensor) -> None:
    """Give back the memory of swiglu(gate_up), which the operation that made `output` has saved, until the gradient of
    `output` is there."""
    storage, shape = activated.untyped_storage(), activated.shape
    # Emptied by the hook: autograd keeps hooks, and what they hold, until the whole backward pass has ended.
    held = [(storage, storage.nbytes(), gate_up.detach())]

    def refill(grad: torch.Tensor) -> None:
        storage, size, gate_up = held.pop()
        storage.resize_(size)
        # Over the same memory, but no view of it: autograd would take the writing for a change of what was saved.
        compute(gate_up, gate_up.new_empty(0).set_(storage, 0, shape))

    output.register_hook(refill)
    storage.resize_(0)


def use_gated_mlps(layers: Any, recomputes: bool) -> None:
    """Turn the dense MLPs of transformer layers into GatedMLPs, in place: a layer gives its tensor group to a module
    that is exactly MLP, and to none of its subclasses (megatron-core 0.16.1, transformer_layer.py)."""
    for layer in layers:
        if type(layer.mlp) is MLP:
            layer.mlp.__class__ = GatedMLP
            layer.mlp.recomputes = recomputes
