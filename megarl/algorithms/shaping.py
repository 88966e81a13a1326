"""What is done about answers that come near the length limit, or are cut at it, before they are learned from."""

from __future__ import annotations

import numpy as np

from megarl.types import BoolArray, FinishReason


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the score of an answer of `length` tokens: 0 up to the buffer, then linearly down to -factor.

        start = max_length - buffer
        0                                       length <= start
        factor * (start - length) / buffer      start < length <= max_length
        -factor                                 max_length < length

    DAPO (arXiv 2503.14476), equation 13, soft overlong punishment; factor 1, max_length 20,480 and a buffer of 4,096
    are the paper's. A buffer of 0 punishes nothing up to max_length, so that it can stand for none.

    Raises:
        ValueError: a negative length or factor; a buffer outside [0, max_length].

    >>> [overlong_penalty(length, max_length=20, buffer=4) for length in (16, 17, 20, 21)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if length < 0 or not factor >= 0:
        raise ValueError(f"length and factor must not be negative, got length={length}, factor={factor}")
    if not 0 <= buffer <= max_length:
        raise ValueError(f"the buffer is a part of max_length, got buffer={buffer}, max_length={max_length}")
    excess = min(length, max_length + 1) - (max_length - buffer)
    if excess <= 0:
        return 0.0
    return -factor if excess >= buffer else -factor * excess / buffer


def without_truncated(loss_mask: BoolArray, finish_reason: FinishReason) -> BoolArray:
    """The loss mask of an answer, all False where it was cut at the length limit: over-long filtering.

    DAPO (arXiv 2503.14476), section 3.4: whether a truncated answer would have been right is not known, so that its
    score is noise. It still counts in what the other answers to its prompt are compared with.

    Args:
        loss_mask: [R].

    >>> without_truncated(np.array([True, False]), "length"), without_truncated(np.array([True, False]), "stop")
    (array([False, False]), array([ True, False]))
    """
    return np.zeros_like(loss_mask) if finish_reason == "length" else loss_mask
