"""How per-token losses become one number: as weights, so that nothing downstream has to know the layout.

A loss in this package never reduces. The caller multiplies its per-token values by these weights and sums. Because a
weight depends only on the sequence and on two counts over the whole mini-batch, the sum over all data-parallel ranks
and micro-batches is the aggregate, and so is its gradient, however sequences are packed, split or placed.
"""

from __future__ import annotations

from collections.abc import Sequence

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant")


def sequence_weights(
    aggregation: str,
    num_loss_tokens: Sequence[int],
    global_tokens: int,
    global_sequences: int,
    normaliser: float | None = None,
) -> list[float]:
    """The weight of each loss token of each sequence: `sum_i w_i * sum_t loss[i, t]` over ALL ranks is the aggregate.

    With n_i loss tokens in sequence i, N = global_tokens = sum of n_i and S = global_sequences, both over the whole
    mini-batch:

    * "token-mean": w_i = 1 / N. DAPO (arXiv 2503.14476); verl's default.
    * "seq-mean-token-sum": w_i = 1 / S.
    * "seq-mean-token-mean": w_i = 1 / (S * n_i). GRPO (DeepSeekMath, arXiv 2402.03300, equation 3).
    * "constant": w_i = 1 / normaliser, the same for every mini-batch. Dr. GRPO (Understanding R1-Zero-Like Training,
      arXiv 2503.20783). The normaliser is the whole divisor: for Dr. GRPO, sequences in a mini-batch x maximum
      response length.

    Args:
        num_loss_tokens: n_i of the sequences at hand (this rank, or this micro-batch).
        global_tokens: N; a count of loss tokens, not of all tokens.
        global_sequences: S; counts only sequences with at least one loss token.

    A sequence without a loss token gets 0.

    Raises:
        ValueError: unknown aggregation; "constant" without a positive normaliser; a negative count; more tokens or
            sequences here than `global_tokens` or `global_sequences` say there are (the weights would then not add up).

    >>> sequence_weights("seq-mean-token-mean", [4, 0, 1], global_tokens=5, global_sequences=2)
    [0.125, 0.0, 0.5]
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")
    if any(n < 0 for n in num_loss_tokens):
        raise ValueError(f"num_loss_tokens has a negative count: {min(num_loss_tokens)}")
    if sum(num_loss_tokens) > global_tokens:
        raise ValueError(
            f"{sum(num_loss_tokens)} loss tokens here, but global_tokens={global_tokens}: count them over all ranks"
        )
    num_sequences = sum(n > 0 for n in num_loss_tokens)
    if num_sequences > global_sequences:
        raise ValueError(
            f"{num_sequences} sequences with a loss token here, but global_sequences={global_sequences}: "
            "count them over all ranks"
        )
    if aggregation == "constant" and (normaliser is None or not normaliser > 0):
        raise ValueError(f'aggregation "constant" needs a normaliser above 0, got {normaliser}')

    def weight(n: int) -> float:
        if aggregation == "token-mean":
            return 1.0 / global_tokens
        if aggregation == "seq-mean-token-sum":
            return 1.0 / global_sequences
        if aggregation == "seq-mean-token-mean":
            return 1.0 / (global_sequences * n)
        assert normaliser is not None, "checked above"
        return 1.0 / normaliser

    return [weight(n) if n > 0 else 0.0 for n in num_loss_tokens]
