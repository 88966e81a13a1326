"""The kernels of swiglu.py. They move what they must and no more: 3 numbers an element forward, 5 backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _compute(gate_up, out, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    start = gate_up + row * 2 * num_columns
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + num_columns + column, mask=inside, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * up
    tl.store(out + row * num_columns + column, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _differentiate(gate_up, grad, found, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    start = row * 2 * num_columns
    gate = tl.load(gate_up + start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + start + num_columns + column, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(grad + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = above * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_up = above * gate * sigmoid
    tl.store(found + start + column, of_gate.to(found.dtype.element_ty), mask=inside)
    tl.store(found + start + num_columns + column, of_up.to(found.dtype.element_ty), mask=inside)


def compute(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up [..., 2 F] to out [..., F], both contiguous."""
    num_columns = out.shape[-1]
    rows = out.numel() // num_columns
    if rows:
        _compute[(rows, triton.cdiv(num_columns, BLOCK))](gate_up, out, num_columns, BLOCK=BLOCK)


def differentiate(gate_up: torch.Tensor, grad: torch.Tensor, found: torch.Tensor) -> None:
    """gate_up [..., 2 F] and the gradient of the result [..., F] to the gradient of gate_up, all contiguous."""
    num_columns = grad.shape[-1]
    rows = grad.numel() // num_columns
    if rows:
        _differentiate[(rows, triton.cdiv(num_columns, BLOCK))](gate_up, grad, found, num_columns, BLOCK=BLOCK)
