"""Sequences of different lengths, one after another in one row (THD), and back again. Pure: numpy only.

Letters: P prompt tokens, R response tokens, S sequences, T packed tokens with padding. A value that belongs to response
token r of a sequence lies at position P - 1 + r of that sequence: where the model sees the tokens before it and
predicts it. So per-token values (log-probs, advantages) have R numbers at positions P-1 .. P+R-2, and `targets` there
are the response tokens.

Balancing and scheduling are in schedule.py; this module also names them, so that one import serves for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.schedule import (
    StepSchedule,
    balance,
    micro_batches,
    micro_batches_of_size,
    padded_length,
    schedule_forward,
    schedule_step,
    sequence_cost,
)
from megarl.types import BoolArray, FloatArray, IntArray, Sample

__all__ = [
    "PackedBatch",
    "StepSchedule",
    "TokenSequence",
    "balance",
    "join_zigzag",
    "micro_batches",
    "micro_batches_of_size",
    "pack",
    "padded_length",
    "schedule_forward",
    "schedule_step",
    "sequence_cost",
    "split_zigzag",
    "unpack",
    "zigzag_indices",
]

Array = npt.NDArray[Any]


class TokenSequence(NamedTuple):
    """What `pack` needs of a sample. TokenSequence([5, 9, 7, 2], 2, [True, True]): two prompt tokens, two response
    tokens."""

    tokens: npt.ArrayLike  # [P + R]
    prompt_length: int
    loss_mask: npt.ArrayLike  # [R], bool

    @classmethod
    def of(cls, sample: Sample) -> TokenSequence:
        return cls(np.concatenate([sample.prompt_ids, sample.response_ids]), len(sample.prompt_ids), sample.loss_mask)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of S sequences, each padded to a multiple, one after another in T tokens.

    For the sequences (P=2, R=2: 5 9 | 7 2) and (P=1, R=1: 4 | 6) with multiple 4:

        tokens       5 9 7 2 | 4 6 0 0      positions    0 1 2 3 | 0 1 2 3
        targets      9 7 2 0 | 6 0 0 0      mask         0 1 1 0 | 1 0 0 0
        cu_seqlens   0 4 8                  lengths      4 2
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T]; counts on through a sequence's padding
    targets: IntArray  # [T]; the next token of the same sequence, 0 where there is none
    mask: BoolArray  # [T]; True where the target is a response token that counts in the loss
    cu_seqlens: npt.NDArray[np.int32]  # [S + 1]; where the padded sequences start, and T
    lengths: IntArray  # [S]; P + R, without padding
    prompt_lengths: IntArray  # [S]
    response_lengths: IntArray  # [S]
    max_seqlen: int
    """Tokens of the longest padded sequence."""
    per_token: dict[str, FloatArray]  # each [T]; 0 outside the response positions
    is_dummy: bool = False
    """True where an empty micro-batch was packed: one pad token without response, which `unpack` leaves out."""

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        """S, of real sequences: 0 for a dummy."""
        return 0 if self.is_dummy else len(self.lengths)


def pack(
    sequences: Sequence[TokenSequence | tuple[npt.ArrayLike, int, npt.ArrayLike]],
    per_token: Mapping[str, Sequence[npt.ArrayLike]] | None = None,
    per_sequence: Mapping[str, Sequence[float]] | None = None,
    multiple: int = 1,
    pad_id: int = 0,
) -> PackedBatch:
    """Pack S sequences into one PackedBatch.

    sequences: (tokens [P + R], P, loss_mask [R]) each, P >= 1, R >= 0. per_token: for each name one array [R] a
    sequence. per_sequence: for each name one number a sequence, repeated on all its R response positions. Both end in
    `PackedBatch.per_token`. multiple: each sequence is padded with `pad_id` to a multiple of it.

    No sequences at all give a dummy batch: one sequence of `multiple` pad tokens, mask all False, `is_dummy` set, every
    name 0.

    Raises ValueError when P < 1, P is more than the tokens, a loss_mask or a per-token array has not R entries, a
    mapping has not S entries, or a name is in both mappings."""
    per_token, per_sequence = per_token or {}, per_sequence or {}
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; it must be at least 1")
    _check_names(per_token, per_sequence, len(sequences))
    is_dummy = not sequences
    if is_dummy:
        sequences = [TokenSequence([pad_id], 1, [])]
    parts = [
        (np.asarray(tokens, np.int64), int(prompt_length), np.asarray(loss_mask, np.bool_))
        for tokens, prompt_length, loss_mask in sequences
    ]
    for number, (own, prompt_length, loss_mask) in enumerate(parts):
        _check_sequence(number, own, prompt_length, loss_mask)

    lengths = np.array([len(own) for own, _, _ in parts], np.int64)
    prompt_lengths = np.array([prompt_length for _, prompt_length, _ in parts], np.int64)
    padded = -(-lengths // multiple) * multiple
    cu_seqlens = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    total = int(cu_seqlens[-1])

    tokens = np.full(total, pad_id, np.int64)
    targets = np.zeros(total, np.int64)
    mask = np.zeros(total, np.bool_)
    values = {name: np.zeros(total, np.float32) for name in (*per_token, *per_sequence)}
    for number, (own, prompt_length, loss_mask) in enumerate(parts):
        start = int(cu_seqlens[number])
        tokens[start : start + len(own)] = own
        targets[start : start + len(own) - 1] = own[1:]
        where = _response_slice(start, prompt_length, len(own))
        mask[where] = loss_mask
        if is_dummy:
            continue
        for name, arrays in per_token.items():
            array = np.asarray(arrays[number], np.float32)
            if array.shape != (len(own) - prompt_length,):
                raise ValueError(
                    f"per_token[{name!r}] of sequence {number} has shape {array.shape}; the sequence has "
                    f"{len(own) - prompt_length} response tokens, give one value for each"
                )
            values[name][where] = array
        for name, numbers in per_sequence.items():
            values[name][where] = numbers[number]
    return PackedBatch(
        tokens=tokens,
        positions=np.arange(total, dtype=np.int64) - np.repeat(cu_seqlens[:-1].astype(np.int64), padded),
        targets=targets,
        mask=mask,
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        response_lengths=lengths - prompt_lengths,
        max_seqlen=int(padded.max()),
        per_token=values,
        is_dummy=is_dummy,
    )


def unpack(values: Array, batch: PackedBatch) -> list[Array]:
    """The values at each sequence's response positions P-1 .. P+R-2: the inverse of `pack`'s per_token.

    values: [T, ...] in the batch's order (after `join_zigzag` under context parallel). Gives S arrays [R, ...], copies
    in the same dtype; none for a dummy batch. Raises ValueError when values have not T rows."""
    if len(values) != batch.num_tokens:
        raise ValueError(
            f"there are {len(values)} values for a batch of {batch.num_tokens} packed tokens; gather all parts before "
            f"unpacking"
        )
    if batch.is_dummy:
        return []
    bounds = zip(batch.cu_seqlens[:-1], batch.prompt_lengths, batch.lengths, strict=True)
    return [values[_response_slice(int(start), int(prompt), int(length))].copy() for start, prompt, length in bounds]


def _response_slice(start: int, prompt_length: int, length: int) -> slice:
    return slice(start + prompt_length - 1, start + length - 1)


def _check_names(
    per_token: Mapping[str, Sequence[Any]], per_sequence: Mapping[str, Sequence[Any]], num_sequences: int
) -> None:
    both = sorted(set(per_token) & set(per_sequence))
    if both:
        raise ValueError(
            f"{both} are in per_token and in per_sequence; both end in PackedBatch.per_token, so rename one"
        )
    for kind, mapping in (("per_token", per_token), ("per_sequence", per_sequence)):
        for name, entries in mapping.items():
            if len(entries) != num_sequences:
                raise ValueError(
                    f"{kind}[{name!r}] has {len(entries)} entries for {num_sequences} sequences; give one for each"
                )


def _check_sequence(number: int, tokens: IntArray, prompt_length: int, loss_mask: BoolArray) -> None:
    if tokens.ndim != 1:
        raise ValueError(f"the tokens of sequence {number} have shape {tokens.shape}; they must be a flat list")
    if not 1 <= prompt_length <= len(tokens):
        raise ValueError(
            f"sequence {number} has {len(tokens)} tokens and a prompt of {prompt_length}; a prompt has at least 1 "
            f"token (the first response token is predicted from it) and no more than the sequence"
        )
    if loss_mask.shape != (len(tokens) - prompt_length,):
        raise ValueError(
            f"the loss_mask of sequence {number} has shape {loss_mask.shape}; the sequence has {len(tokens)} - "
            f"{prompt_length} = {len(tokens) - prompt_length} response tokens, give one entry for each"
        )


def zigzag_indices(cu_seqlens: npt.ArrayLike, context_size: int, context_rank: int) -> IntArray:
    """Which of T packed tokens a context-parallel rank holds, in the order it holds them: [T / context_size].

    Each padded sequence is cut into 2 x context_size chunks; rank r holds chunks r and 2 x context_size - 1 - r, so
    that causal attention costs every rank the same. zigzag_indices([0, 8], 2, 0) == [0, 1, 6, 7].

    Raises ValueError when the rank is out of range or a padded sequence is no multiple of 2 x context_size
    (context_size > 1)."""
    starts = np.asarray(cu_seqlens, np.int64)
    if not 0 <= context_rank < context_size:
        raise ValueError(
            f"context_rank is {context_rank}; with context_size {context_size} it must be 0 to {context_size - 1}"
        )
    if context_size == 1:
        return np.arange(starts[-1], dtype=np.int64)
    chunks = 2 * context_size
    padded = np.diff(starts)
    wrong = np.flatnonzero(padded % chunks)
    if len(wrong):
        raise ValueError(
            f"padded sequence {wrong[0]} has {padded[wrong[0]]} tokens, which 2 x context size = {chunks} does not "
            f"divide; pack with a multiple of {chunks}"
        )
    size = padded // chunks
    begins = np.stack(
        [starts[:-1] + size * context_rank, starts[:-1] + size * (chunks - 1 - context_rank)], axis=1
    ).ravel()
    counts = np.repeat(size, 2)
    within = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    indices: IntArray = np.repeat(begins, counts) + within
    return indices


def split_zigzag(array: Array, cu_seqlens: npt.ArrayLike, context_size: int, context_rank: int) -> Array:
    """The part of `array` [T, ...] that a context-parallel rank holds: [T / context_size, ...]. See
    `zigzag_indices`."""
    _check_total(len(array), cu_seqlens)
    part: Array = array[zigzag_indices(cu_seqlens, context_size, context_rank)]
    return part


def join_zigzag(parts: Sequence[Array], cu_seqlens: npt.ArrayLike) -> Array:
    """The inverse of `split_zigzag`: the parts [T / context_size, ...] of all context-parallel ranks, in rank order, to
    [T, ...]."""
    _check_total(sum(len(part) for part in parts), cu_seqlens)
    joined = np.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        joined[zigzag_indices(cu_seqlens, len(parts), rank)] = part
    return joined


def _check_total(total: int, cu_seqlens: npt.ArrayLike) -> None:
    expected = int(np.asarray(cu_seqlens)[-1])
    if total != expected:
        raise ValueError(
            f"there are {total} tokens, but cu_seqlens ends at {expected}; give the padded array of the same batch"
        )
