"""The weights add up to the aggregate, and the gradient does not depend on how the batch is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.aggregation import AGGREGATIONS, sequence_weights
from megarl.algorithms.losses import policy_loss

# Three sequences with the losses [1, 2, 3], [], [5]: N = 4 tokens, S = 2 sequences with a loss token.
LOSSES = [[1.0, 2.0, 3.0], [], [5.0]]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 2.75),  # (1 + 2 + 3 + 5) / 4
        ("seq-mean-token-sum", 5.5),  # (6 + 5) / 2
        ("seq-mean-token-mean", 3.5),  # (6 / 3 + 5 / 1) / 2
        ("constant", 1.1),  # 11 / 10
    ],
)
def test_weighted_sum_is_the_aggregate(aggregation: str, expected: float) -> None:
    weights = sequence_weights(aggregation, [3, 0, 1], global_tokens=4, global_sequences=2, normaliser=10.0)
    assert sum(w * sum(losses) for w, losses in zip(weights, LOSSES, strict=True)) == pytest.approx(expected)
    assert weights[1] == 0.0


def test_every_aggregation_is_covered() -> None:
    assert AGGREGATIONS == ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rank_without_loss_tokens_gets_zeros(aggregation: str) -> None:
    assert sequence_weights(aggregation, [0, 0], global_tokens=0, global_sequences=0, normaliser=1.0) == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(data=st.data())
def test_loss_and_gradient_are_the_same_for_any_split(aggregation: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    # Each sequence goes to one of three (rank, micro-batch) places, in any order.
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    num_tokens, num_sequences = sum(lengths), sum(n > 0 for n in lengths)
    old = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    start = old + 0.3 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    def weighted_loss(logprobs: torch.Tensor, members: list[int]) -> torch.Tensor:
        index = torch.cat([torch.arange(num_tokens).split(lengths)[i] for i in members])
        counts = [lengths[i] for i in members]
        weights = sequence_weights(aggregation, counts, num_tokens, num_sequences, normaliser=7.0)
        per_token = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
        return (policy_loss(logprobs[index], old[index], advantages[index], 0.2, 0.2, 3.0).loss * per_token).sum()

    whole = start.clone().requires_grad_()
    loss = weighted_loss(whole, list(range(len(lengths))))
    loss.backward()

    parts = start.clone().requires_grad_()
    total = 0.0
    for place in range(3):
        members = [i for i in range(len(lengths)) if places[i] == place]
        if members:
            part = weighted_loss(parts, members)
            part.backward()  # accumulates, as micro-batches do
            total += part.item()

    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert whole.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregation": "mean"}, "token-mean, seq-mean-token-sum"),
        ({"num_loss_tokens": [5]}, "5 loss tokens here, but global_tokens=4"),
        ({"num_loss_tokens": [1, 1, 1]}, "3 sequences with a loss token here, but global_sequences=2"),
        ({"num_loss_tokens": [-1]}, "negative"),
        ({"aggregation": "constant"}, "normaliser above 0, got None"),
        ({"aggregation": "constant", "normaliser": 0.0}, "normaliser above 0, got 0.0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_numbers(change: dict[str, object], message: str) -> None:
    arguments = {"aggregation": "token-mean", "num_loss_tokens": [1], "global_tokens": 4, "global_sequences": 2}
    with pytest.raises(ValueError, match=message):
        sequence_weights(**(arguments | change))  # type: ignore[arg-type]
