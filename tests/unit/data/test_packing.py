"""Packing into one row and back, and the zig-zag split of context parallelism."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from megarl.data.packing import TokenSequence, join_zigzag, pack, split_zigzag, unpack, zigzag_indices
from megarl.types import Sample

TWO = [TokenSequence([5, 9, 7, 2], 2, [True, True]), TokenSequence([4, 6], 1, [True])]


def test_two_sequences_by_hand():
    batch = pack(TWO, {"logprobs": [[-1.0, -2.0], [-3.0]]}, {"advantages": [0.5, -0.5]}, multiple=4, pad_id=99)
    assert_array_equal(batch.tokens, [5, 9, 7, 2, 4, 6, 99, 99])
    assert_array_equal(batch.positions, [0, 1, 2, 3, 0, 1, 2, 3])
    assert_array_equal(batch.targets, [9, 7, 2, 0, 6, 0, 0, 0])
    assert_array_equal(batch.mask, [False, True, True, False, True, False, False, False])
    assert_array_equal(batch.cu_seqlens, [0, 4, 8])
    assert_array_equal(batch.per_token["logprobs"], [0, -1, -2, 0, -3, 0, 0, 0])
    assert_array_equal(batch.per_token["advantages"], [0, 0.5, 0.5, 0, -0.5, 0, 0, 0])
    assert_array_equal(batch.lengths, [4, 2])
    assert_array_equal(batch.prompt_lengths, [2, 1])
    assert_array_equal(batch.response_lengths, [2, 1])
    assert (batch.max_seqlen, batch.num_tokens, batch.num_sequences, batch.is_dummy) == (4, 8, 2, False)
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == np.int64
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.per_token["logprobs"].dtype == np.float32


def test_a_token_that_the_policy_did_not_write_has_values_but_no_loss():
    batch = pack([TokenSequence([1, 2, 3, 4], 1, [True, False, True])], per_sequence={"advantages": [2.0]})
    assert_array_equal(batch.mask, [True, False, True, False])
    assert_array_equal(batch.per_token["advantages"], [2, 2, 2, 0])


def test_without_a_multiple_there_is_no_padding():
    batch = pack(TWO)
    assert_array_equal(batch.cu_seqlens, [0, 4, 6])
    assert_array_equal(batch.tokens, [5, 9, 7, 2, 4, 6])


def test_unpack_gives_the_response_positions():
    batch = pack(TWO, multiple=4)
    first, second = unpack(np.arange(8), batch)
    assert_array_equal(first, [1, 2])  # P-1 .. P+R-2
    assert_array_equal(second, [4])


def test_unpacked_targets_are_the_response_tokens():
    batch = pack(TWO, multiple=8)
    first, second = unpack(batch.targets, batch)
    assert_array_equal(first, [7, 2])
    assert_array_equal(second, [6])


def test_unpack_copies_so_that_the_packed_row_can_be_freed():
    values = np.zeros(8)
    assert not np.shares_memory(unpack(values, pack(TWO, multiple=4))[0], values)


def test_an_answer_without_tokens_packs_and_unpacks():
    batch = pack([TokenSequence([3, 4], 2, []), *TWO], {"values": [[], [1, 2], [3]]})
    assert not batch.mask[:2].any()
    assert [len(values) for values in unpack(batch.per_token["values"], batch)] == [0, 2, 1]


def test_an_empty_micro_batch_becomes_a_dummy_without_weight():
    batch = pack([], {"logprobs": []}, {"advantages": []}, multiple=4, pad_id=7)
    assert batch.is_dummy
    assert batch.num_sequences == 0
    assert_array_equal(batch.tokens, [7, 7, 7, 7])
    assert_array_equal(batch.cu_seqlens, [0, 4])
    assert not batch.mask.any()
    assert set(batch.per_token) == {"logprobs", "advantages"}
    assert not batch.per_token["logprobs"].any()
    assert unpack(np.zeros(4), batch) == []


def test_a_sample_becomes_a_sequence():
    sample = Sample(
        uid="0-1/0",
        group="0-1",
        prompt_ids=np.array([5, 9]),
        response_ids=np.array([7, 2]),
        rollout_logprobs=np.zeros(2, np.float32),
        loss_mask=np.array([True, False]),
        weight_versions=np.zeros(2, np.int64),
        score=1.0,
        finish_reason="stop",
        data_source="x",
    )
    batch = pack([TokenSequence.of(sample)])
    assert_array_equal(batch.tokens, [5, 9, 7, 2])
    assert_array_equal(batch.mask, [False, True, False, False])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": [([1, 2], 0, [True, True])]}, "sequence 0 has 2 tokens and a prompt of 0"),
        ({"sequences": [([1, 2], 3, [])]}, "sequence 0 has 2 tokens and a prompt of 3"),
        ({"sequences": [([1, 2], 1, [True, True])]}, r"loss_mask of sequence 0 has shape \(2,\).* 2 - 1 = 1 response"),
        ({"sequences": [([[1, 2]], 1, [True])]}, r"tokens of sequence 0 have shape \(1, 2\)"),
        ({"per_token": {"a": [[1.0, 2.0]]}}, r"per_token\['a'\] has 1 entries for 2 sequences"),
        ({"per_token": {"a": [[1.0], [1.0]]}}, r"per_token\['a'\] of sequence 0 has shape \(1,\).* 2 response"),
        ({"per_sequence": {"a": [1.0]}}, r"per_sequence\['a'\] has 1 entries for 2 sequences"),
        ({"per_token": {"a": [[1, 2], [3]]}, "per_sequence": {"a": [1, 2]}}, r"\['a'\] are in per_token and in per_s"),
        ({"multiple": 0}, "multiple is 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"sequences": TWO, **arguments})


def test_unpack_refuses_values_of_another_batch():
    with pytest.raises(ValueError, match="4 values for a batch of 8 packed tokens"):
        unpack(np.zeros(4), pack(TWO, multiple=4))


@st.composite
def sequence_lists(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
    token = st.integers(1, 1000)
    return [
        TokenSequence(
            draw(st.lists(token, min_size=p + r, max_size=p + r)),
            p,
            draw(st.lists(st.booleans(), min_size=r, max_size=r)),
        )
        for p, r in shapes
    ]


@given(sequence_lists(), st.sampled_from([1, 2, 4, 8]))
def test_packing_any_sequences(sequences, multiple):
    values = [np.arange(len(mask), dtype=np.float32) + 100 * i for i, (_, _, mask) in enumerate(sequences)]
    batch = pack(sequences, {"values": values}, multiple=multiple)
    assert len(batch.tokens) == batch.cu_seqlens[-1]
    assert batch.max_seqlen == np.diff(batch.cu_seqlens).max()
    for i, (tokens, prompt_length, loss_mask) in enumerate(sequences):
        start, end = batch.cu_seqlens[i], batch.cu_seqlens[i + 1]
        assert (end - start) % multiple == 0
        assert 0 <= end - start - len(tokens) < multiple
        own = slice(start, start + len(tokens))
        assert_array_equal(batch.tokens[own], tokens)
        assert_array_equal(batch.targets[own], [*tokens[1:], 0])
        assert_array_equal(batch.positions[start:end], np.arange(end - start))
        expected = [False] * (prompt_length - 1) + list(loss_mask) + [False]
        assert_array_equal(batch.mask[own], expected)
        assert not batch.mask[start + len(tokens) : end].any()
        assert not batch.targets[start + len(tokens) : end].any()
    for got, want in zip(unpack(batch.per_token["values"], batch), values, strict=True):
        assert_array_equal(got, want)


def test_zigzag_by_hand():
    # Sequences of 8 and 4 tokens, two ranks, four chunks of 2 and of 1: rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
    array = np.arange(12) * 10
    assert_array_equal(split_zigzag(array, [0, 8, 12], 2, 0), [0, 10, 60, 70, 80, 110])
    assert_array_equal(split_zigzag(array, [0, 8, 12], 2, 1), [20, 30, 40, 50, 90, 100])


def test_one_context_rank_has_everything_whatever_the_length():
    assert_array_equal(zigzag_indices([0, 3, 4], 1, 0), [0, 1, 2, 3])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_join_is_the_inverse_of_split(chunks, context_size, two_columns):
    cu_seqlens = np.cumsum([0, *(2 * context_size * chunk for chunk in chunks)]).astype(np.int32)
    array = np.random.default_rng(0).normal(size=(cu_seqlens[-1], 2) if two_columns else cu_seqlens[-1])
    parts = [split_zigzag(array, cu_seqlens, context_size, rank) for rank in range(context_size)]
    assert {len(part) for part in parts} == {cu_seqlens[-1] // context_size}
    assert_array_equal(join_zigzag(parts, cu_seqlens), array)


@given(st.integers(1, 6), st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_causal_work(chunk, context_size):
    length = 2 * context_size * chunk
    work = {int((zigzag_indices([0, length], context_size, rank) + 1).sum()) for rank in range(context_size)}
    assert len(work) == 1


def test_zigzag_refuses_what_cannot_be_split():
    with pytest.raises(ValueError, match="padded sequence 1 has 6 tokens, which 2 x context size = 4 does not divide"):
        zigzag_indices([0, 4, 10], 2, 0)
    with pytest.raises(ValueError, match="context_rank is 2"):
        zigzag_indices([0, 4], 2, 2)
    with pytest.raises(ValueError, match="there are 5 tokens, but cu_seqlens ends at 4"):
        split_zigzag(np.zeros(5), [0, 4], 2, 0)
