"""Log-probabilities and entropy over a vocabulary-parallel output layer, without ever holding [T, V] in float32.

With logits z = x / temperature over the vocabulary V, of which each tensor-parallel rank holds V / tp columns:

    log p(y) = z_y - log sum_v exp(z_v)              d log p(y) / d x_v = (1[v = y] - p_v) / temperature
    H = log sum_v exp(z_v) - sum_v p_v z_v           d H / d x_v        = -p_v (log p_v + H) / temperature

Tokens go through in chunks; each rank reduces its own columns, and two small reductions over the group join them. The
backward pass computes the softmax of each chunk again from the saved log-sum-exp.

`vocab_parallel_logprobs` starts from logits that are already there and writes their gradient in their own dtype.
`fused_logprobs` starts from the hidden states: the logits exist one chunk at a time only, in both passes, at the price
of one more product with the output weight in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DEFAULT_CHUNK_SIZE = 4096
"""Tokens a chunk: for a vocabulary of 151,936 its logits, which its gradient is written over, are 1.2 GB / tp in bf16;
the float32 between lives in registers where kernels of our own do it. Measured in docs/performance.md."""

Group = dist.ProcessGroup | None


class Logprobs(NamedTuple):
    logprobs: torch.Tensor  # [T], float32, nats
    entropy: torch.Tensor | None  # [T], float32, nats


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    with_entropy: bool = False,
    compiles: bool = False,
) -> Logprobs:
    """Log-probability of each target, and the distribution's entropy, in nats, of softmax(logits / temperature).

    Args:
        logits: [T, V / tp], this rank's columns, any float dtype; rank r of the group has columns r V / tp onwards.
        targets: [T], int64, tokens of the whole vocabulary, the same on all ranks of the group.
        group: the tensor-parallel group; None: the logits are whole.
        temperature: the logits are divided by it.
        vocab_size: columns from here on are padding and get probability 0; None: there is no padding.
        chunk_size: tokens that are held in float32 at once.
        with_entropy: also compute the entropy (one more number a token is held).
        compiles: do each chunk's arithmetic in one kernel of our own (vocab_triton.py); needs a GPU.

    Returns (logprobs [T], entropy [T] or None), float32, the same on all ranks of the group, both differentiable.

    Raises ValueError when shapes do not agree or the temperature is not above 0."""
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits are {tuple(logits.shape)} and targets {tuple(targets.shape)}; need [T, V / tp] and [T]"
        )
    shard = _shard(logits.shape[1], targets, group, temperature, vocab_size, chunk_size, with_entropy, compiles)
    logprobs, entropy = _FromLogits.apply(logits, shard)
    return Logprobs(logprobs, entropy if with_entropy else None)


def fused_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: Group,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    with_entropy: bool = False,
    compiles: bool = False,
    main_grad: torch.Tensor | None = None,
) -> Logprobs:
    """`vocab_parallel_logprobs` of logits = hidden x weight^T.

    hidden: [T, H], the same on all ranks of the group; weight: [V / tp, H], this rank's rows; the rest as there. The
    gradient of hidden is that of this rank's columns only: sum it over the group (Megatron's
    copy_to_tensor_model_parallel_region, or gather_from_sequence_parallel_region, in front does).

    main_grad: [V / tp, H], float32: the gradient of weight is added to it, unrounded, and autograd gets zeros for it
    (so that whatever waits for the weight's gradient still runs). None: autograd gets it.

    Raises ValueError when shapes do not agree or the temperature is not above 0."""
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}; need "
            f"[T, H], [V / tp, H] and [T]"
        )
    shard = _shard(weight.shape[0], targets, group, temperature, vocab_size, chunk_size, with_entropy, compiles)
    logprobs, entropy = _FromHidden.apply(hidden, weight, main_grad, shard)
    return Logprobs(logprobs, entropy if with_entropy else None)


class _Shard(NamedTuple):
    """This rank's columns of the vocabulary, and what is asked of them."""

    column: torch.Tensor  # [T]; the targets' columns here, clamped into range
    is_here: torch.Tensor  # [T]; which of the targets are really here
    valid: int  # columns that are not padding
    group: Group
    temperature: float
    chunk_size: int
    with_entropy: bool
    compiles: bool

    @property
    def chunks(self) -> list[slice]:
        num_tokens = len(self.column) if self.valid else 0  # a rank of nothing but padding has nothing to compute
        return [slice(start, start + self.chunk_size) for start in range(0, num_tokens, self.chunk_size)]


def _shard(
    num_columns: int,
    targets: torch.Tensor,
    group: Group,
    temperature: float,
    vocab_size: int | None,
    chunk_size: int,
    with_entropy: bool,
    compiles: bool,
) -> _Shard:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    first = dist.get_rank(group) * num_columns if group is not None else 0
    valid = num_columns if vocab_size is None else min(max(vocab_size - first, 0), num_columns)
    column = targets - first
    is_here = (column >= 0) & (column < valid)
    column = column.clamp(0, max(valid - 1, 0))
    return _Shard(column, is_here, valid, group, temperature, chunk_size, with_entropy, compiles)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy, log_sums = _statistics(lambda chunk: logits[chunk, : shard.valid], shard)
        ctx.save_for_backward(logits, log_sums, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        logits, log_sums, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = torch.empty_like(logits)
        grad[:, shard.valid :] = 0
        for chunk in shard.chunks:
            valid = logits[chunk, : shard.valid]
            _gradient(valid, chunk, shard, log_sums, entropy, *upstream, out=grad[chunk, : shard.valid])
        return grad, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor | None, shard: _Shard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = weight[: shard.valid]
        logprobs, entropy, log_sums = _statistics(lambda chunk: hidden[chunk] @ rows.T, shard)
        ctx.save_for_backward(hidden, weight, log_sums, entropy)
        ctx.shard, ctx.main_grad = shard, main_grad
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        hidden, weight, log_sums, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        rows = weight[: shard.valid]
        grad_hidden = torch.zeros_like(hidden)
        # Summed over chunks in float32: bfloat16 would forget the small ones.
        total: torch.Tensor | None = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros_like(weight, dtype=torch.float32) if ctx.main_grad is None else ctx.main_grad
        for chunk in shard.chunks:
            logits = hidden[chunk] @ rows.T
            _gradient(logits, chunk, shard, log_sums, entropy, *upstream, out=logits)
            torch.mm(logits, rows, out=grad_hidden[chunk])
            if total is not None:
                _add_product(total[: shard.valid], logits.T, hidden[chunk])
        if total is None:
            return grad_hidden, None, None, None
        return grad_hidden, torch.zeros_like(weight) if total is ctx.main_grad else total.to(weight.dtype), None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, total in float32; on a GPU without rounding the product to the factors' type first."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _statistics(
    logits_of: Callable[[slice], torch.Tensor], shard: _Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs [T], entropy [T] or empty, log-sum-exp [T]) over the whole vocabulary. logits_of: the valid columns of
    a chunk of tokens."""
    column = shard.column
    largest = torch.full(column.shape, -torch.inf, dtype=torch.float32, device=column.device)
    picked, sums, weighted = (torch.zeros_like(largest) for _ in range(3))
    for chunk in shard.chunks:
        found = _reduce_chunk(logits_of(chunk), column[chunk], shard)
        for whole, part in zip((largest, picked, sums, weighted), found, strict=True):
            whole[chunk] = part
    overall = _reduced(largest.clone(), dist.ReduceOp.MAX, shard.group)
    # All logits are taken relative to the largest one before anything is summed: so no digits are lost.
    shift = largest - overall
    factor = shift.exp()
    weighted = torch.where(factor > 0, (weighted + sums * shift) * factor, 0.0)
    parts = [sums * factor, torch.where(shard.is_here, picked - overall, 0.0), weighted]
    total = _reduced(torch.stack(parts), dist.ReduceOp.SUM, shard.group)
    log_total = total[0].log()
    entropy = log_total - total[2] / total[0] if shard.with_entropy else log_total.new_empty(0)
    return total[1] - log_total, entropy, overall + log_total


def _reduce_chunk(logits: torch.Tensor, column: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, ...]:
    if shard.compiles:
        from megarl.parallel import vocab_triton

        return vocab_triton.statistics(logits, column, shard.temperature, shard.with_entropy)
    return _chunk_statistics(logits, column, shard.temperature, shard.with_entropy)


def _gradient(
    logits: torch.Tensor,
    chunk: slice,
    shard: _Shard,
    log_sums: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Of a chunk's valid columns, in the logits' type; into `out`, which may be the logits."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sums)
    at_target = torch.where(shard.is_here[chunk], grad_logprobs[chunk], 0.0)
    of_entropy = None
    if grad_entropy is not None and shard.with_entropy:
        of_entropy = (entropy[chunk], grad_entropy[chunk])
    given = (logits, shard.column[chunk], log_sums[chunk], grad_logprobs[chunk], at_target, of_entropy)
    if shard.compiles:
        from megarl.parallel import vocab_triton

        vocab_triton.gradient(*given, shard.temperature, out)
    else:
        out.copy_(_chunk_gradient(*given, shard.temperature))


# ------------------------------------------------------------------------------------------------ a chunk of tokens


def _chunk_statistics(
    logits: torch.Tensor, column: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of z = logits / temperature: the largest m, z at `column`, sum exp(z - m), and
    sum exp(z - m) (z - m), which is left out (zeros) without entropy. Each [C], float32."""
    scaled = logits.float() / temperature
    largest = scaled.amax(dim=-1)
    picked = scaled.gather(1, column[:, None])[:, 0]
    shifted = scaled - largest[:, None]
    weights = shifted.exp()
    sums = weights.sum(dim=-1)
    weighted = (weights * shifted).sum(dim=-1) if with_entropy else torch.zeros_like(sums)
    return largest, picked, sums, weighted


def _chunk_gradient(
    logits: torch.Tensor,
    column: torch.Tensor,
    log_sums: torch.Tensor,
    grad_logprobs: torch.Tensor,
    at_target: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: float,
) -> torch.Tensor:
    """The formulas at the top of this file. at_target: the log-prob's gradient where the target is a column of this
    rank, else 0. of_entropy: (entropy, its gradient)."""
    log_softmax = logits.float() / temperature - log_sums[:, None]
    slope = grad_logprobs[:, None]
    if of_entropy is not None:
        entropy, grad_entropy = of_entropy
        slope = slope + (log_softmax + entropy[:, None]) * grad_entropy[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    grad = torch.where(is_target, at_target[:, None], 0.0) - log_softmax.exp() * slope
    return (grad / temperature).to(logits.dtype)


def _reduced(tensor: torch.Tensor, operation: Any, group: Group) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor
