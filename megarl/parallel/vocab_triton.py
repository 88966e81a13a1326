"""The kernels of vocab.py: a chunk of logits is read once for its statistics, and once for its gradient, which may be
written over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STATISTICS_BLOCK = 8192
GRADIENT_BLOCK = 4096


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    columns,
    largest,
    picked,
    sums,
    weighted,
    stride,
    num_columns,
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    most = -float("inf")
    total = 0.0
    moment = 0.0
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < num_columns
        scaled = tl.load(start + column, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        new = tl.maximum(most, tl.max(scaled, axis=0))
        shifted = scaled - new
        weights = tl.exp(shifted)
        factor = tl.exp(most - new)
        if ENTROPY:
            before = tl.where(total > 0, (moment + total * (most - new)) * factor, 0.0)
            moment = before + tl.sum(tl.where(inside, weights * shifted, 0.0), axis=0)
        total = total * factor + tl.sum(weights, axis=0)
        most = new
    tl.store(largest + row, most)
    tl.store(picked + row, tl.load(start + tl.load(columns + row)).to(tl.float32) / temperature)
    tl.store(sums + row, total)
    tl.store(weighted + row, moment)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    out,
    columns,
    log_sums,
    grad_logprobs,
    at_target,
    entropy,
    grad_entropy,
    stride,
    out_stride,
    num_columns,
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    scaled = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) / temperature
    log_softmax = scaled - tl.load(log_sums + row)
    slope = tl.load(grad_logprobs + row)
    if ENTROPY:
        slope = slope + (log_softmax + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    found = tl.where(column == tl.load(columns + row), tl.load(at_target + row), 0.0) - tl.exp(log_softmax) * slope
    tl.store(out + row * out_stride + column, (found / temperature).to(out.dtype.element_ty), mask=inside)


def statistics(
    logits: torch.Tensor, columns: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As vocab._chunk_statistics. logits: [C, V / tp], columns next to each other."""
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == 1, "the columns of a chunk lie next to each other"
    found = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    _statistics[(num_rows,)](
        logits,
        columns,
        *found.unbind(),
        logits.stride(0),
        num_columns,
        float(temperature),
        ENTROPY=with_entropy,
        BLOCK=STATISTICS_BLOCK,
        num_warps=16,
    )
    largest, picked, sums, weighted = found.unbind()
    return largest, picked, sums, weighted


def gradient(
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_sums: torch.Tensor,
    grad_logprobs: torch.Tensor,
    at_target: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: float,
    out: torch.Tensor,
) -> None:
    """As vocab._chunk_gradient, into `out`, which may be the logits themselves."""
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == out.stride(1) == 1, "the columns of a chunk lie next to each other"
    per_row = [part.contiguous() for part in (log_sums, grad_logprobs, at_target, *(of_entropy or ()))]
    per_row += per_row[:2] if of_entropy is None else []  # not read
    _gradient[(num_rows, triton.cdiv(num_columns, GRADIENT_BLOCK))](
        logits,
        out,
        columns,
        *per_row,
        logits.stride(0),
        out.stride(0),
        num_columns,
        float(temperature),
        ENTROPY=of_entropy is not None,
        BLOCK=GRADIENT_BLOCK,
        num_warps=8,
    )
