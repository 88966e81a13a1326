"""Checksums: they add up over any split, and nothing that goes wrong in a transfer leaves them as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Parameters, allocate, distinct, execute
from tiny_models import declarations, megatron, megatron_layouts, sglang_layouts, tiny_config

from megarl.model.families import declare
from megarl.reshard import checksum
from megarl.reshard.checksum import TensorChecksums, compare, piece_regions, region_checksum
from megarl.reshard.layout import Layout, Piece, Rect, Shard
from megarl.reshard.layouts import hf_layout, sglang_layout
from megarl.reshard.plan import ReshardPlan, plan
from megarl.reshard.regions import RegionSums

MODULUS = 2**64
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64]


def random_matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    bits = torch.randint(0, 256, (rows, cols * dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype)


def piece_checksums(pieces: Any, parameters: Parameters, layout: Layout, dtype: torch.dtype) -> list[int]:
    return RegionSums(piece_regions(pieces, parameters, layout), dtype).run()


def tensor_checksums(layout: Layout, sums: dict[int, list[int]]) -> dict[str, int]:
    return TensorChecksums(layout, sums).of(sums)


def whole(values: torch.Tensor) -> int:
    return region_checksum(values, 0, 0, values.shape[1])


# ------------------------------------------------------------------------------------------------ one tensor


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_regions_add_up_over_any_split(data: st.DataObject, dtype: torch.dtype) -> None:
    rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    values = random_matrix(rows, cols, dtype)
    row_cuts = [0, *sorted(data.draw(st.sets(st.integers(1, rows)))), rows]
    total = 0
    for top, bottom in zip(row_cuts, row_cuts[1:], strict=False):
        column_cuts = [0, *sorted(data.draw(st.sets(st.integers(1, cols)))), cols]
        for left, right in zip(column_cuts, column_cuts[1:], strict=False):
            total += region_checksum(values[top:bottom, left:right], top, left, cols)
    assert total % MODULUS == whole(values)


def test_large_tensors_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_matrix(50, 7, torch.float32)
    expected = whole(values)
    for chunk in (1, 7, 20, 349):
        monkeypatch.setattr(checksum, "_CHUNK", chunk)
        assert whole(values) == expected


def test_one_by_hand() -> None:
    # Position 1 of 1: w = 1 x M, M = 0x9E3779B97F4A7C15 read as signed; then w ^= w >> 29 (arithmetic), w |= 1.
    signed = 0x9E3779B97F4A7C15 - MODULUS
    weight = (signed ^ (signed >> 29)) | 1
    value = torch.tensor([[5]], dtype=torch.uint8)
    assert whole(value) == (5 + 1) * weight % MODULUS


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_one_flipped_bit_is_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    rows, cols = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    values = random_matrix(rows, cols, dtype)
    flipped = values.clone()
    raw = flipped.view(torch.uint8).view(-1)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(flipped) != whole(values)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_swapped_rows_columns_and_regions_are_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    rows, cols = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 8))
    values = random_matrix(rows, cols, dtype, data.draw(st.integers(0, 1000)))
    a, b = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    c, d = data.draw(st.lists(st.integers(0, cols - 1), min_size=2, max_size=2, unique=True))
    swaps = []
    for index, dim in (([a, b], 0), ([c, d], 1)):
        order = list(range(values.shape[dim]))
        order[index[0]], order[index[1]] = index[1], index[0]
        swaps.append(values.view(torch.uint8).view(rows, cols, -1).index_select(dim, torch.tensor(order)))
    half = rows // 2
    swaps.append(torch.cat([values[half : 2 * half], values[:half], values[2 * half :]]).view(torch.uint8))
    for swapped in swaps:
        swapped = swapped.reshape(rows, -1).view(dtype)
        same = torch.equal(swapped.view(torch.uint8), values.view(torch.uint8))
        assert (whole(swapped) == whole(values)) == same


def test_constant_tensors_of_other_values_differ() -> None:
    sums = [whole(torch.full((4, 4), value, dtype=torch.bfloat16)) for value in (0.0, -0.0, 1.0, 2.0)]
    assert len({*sums, 0}) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views_and_copies_have_equal_checksums(dtype: torch.dtype) -> None:
    base = random_matrix(12, 10, dtype)
    for view in (base[::2], base[:, 1::3], base.t(), base[2:9, 3:7]):
        assert whole(view) == whole(view.contiguous())


def test_an_exact_cast_to_the_wires_type_has_an_equal_checksum() -> None:
    values = {"w": torch.randn(6, 4).bfloat16()}
    shard = Shard({"w": (6, 4)}, (Piece("w", Rect(0, 6, 0, 4), "w", 0, 0),))
    layout = Layout("one", {"w": (6, 4)}, (shard,), (0,))
    pieces = layout.shard(0).pieces
    expected = piece_checksums(pieces, values, layout, torch.bfloat16)
    parameter = torch.nn.Parameter(values["w"].float())  # a trainer's fp32 parameter, with gradients on
    assert piece_checksums(pieces, {"w": parameter}, layout, torch.bfloat16) == expected
    assert piece_checksums(pieces, {"w": parameter}, layout, torch.float32) != expected


# ------------------------------------------------------------------------------------------------ whole models


def sums_of(layout: Layout, held: list[Parameters], dtype: torch.dtype) -> dict[int, list[int]]:
    return {rank: piece_checksums(layout.shard(rank).pieces, own, layout, dtype) for rank, own in enumerate(held)}


def moved(source: Layout, held: list[Parameters], target: Layout, made: ReshardPlan | None = None) -> list[Parameters]:
    arrived = allocate(target, torch.float32)
    execute(made or plan(source, target, 4), torch.float32, held, arrived)
    return arrived


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_layout_of_one_model_has_the_same_tensor_checksums(data: st.DataObject) -> None:
    declaration = data.draw(declarations())
    values = distinct(declaration.tensors(), torch.float32)
    hf = hf_layout(declaration)
    expected = tensor_checksums(hf, sums_of(hf, [values], torch.float32))
    assert expected == {n: whole(v.reshape(v.shape[0], -1)) for n, v in values.items()}
    for strategy in (megatron_layouts, sglang_layouts):
        layout = data.draw(strategy(declaration))
        actual = tensor_checksums(layout, sums_of(layout, moved(hf, [values], layout), torch.float32))
        compare(expected, actual, layout.name)
        assert actual == expected


def setting(**sizes: int) -> tuple[Layout, list[Parameters], dict[str, int]]:
    declaration = declare(tiny_config())
    layout, _ = megatron(declaration, **sizes)
    values = distinct(declaration.tensors(), torch.float32)
    held = moved(hf_layout(declaration), [values], layout)
    return layout, held, tensor_checksums(layout, sums_of(layout, held, torch.float32))


def test_replicas_that_differ_are_named_with_their_ranks() -> None:
    layout, held, _ = setting(tensor=2, data=2)
    held[2]["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] += 1
    message = r"model\.layers\.1\.mlp\.down_proj\.weight Rect\(.*\) differs between ranks 0 and 2"
    with pytest.raises(ValueError, match=message):
        tensor_checksums(layout, sums_of(layout, held, torch.float32))


def test_norms_that_differ_between_tensor_ranks_are_named() -> None:
    layout, held, _ = setting(tensor=2)
    held[1]["decoder.final_layernorm.weight"][3] += 1
    with pytest.raises(ValueError, match=r"model\.norm\.weight Rect\(.*\) differs between ranks 0 and 1"):
        tensor_checksums(layout, sums_of(layout, held, torch.float32))


@pytest.mark.parametrize(("rank", "first"), [(2, 0), (3, 1)])
def test_copies_of_sglangs_data_parallel_attention_that_differ_are_named(rank: int, first: int) -> None:
    """Of 2 groups of 2 ranks: ranks 0 and 2, and 1 and 3, hold the same attention."""
    declaration = declare(tiny_config("qwen3"))
    layout = sglang_layout(declaration, 4, 1, 64, data_parallel=2)
    held = moved(hf_layout(declaration), [distinct(declaration.tensors(), torch.float32)], layout)
    held[rank]["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1
    message = rf"o_proj\.weight Rect\(.*\) differs between ranks {first} and {rank}"
    with pytest.raises(ValueError, match=message):
        tensor_checksums(layout, sums_of(layout, held, torch.float32))


def test_a_region_that_no_rank_summed_is_named() -> None:
    layout, held, _ = setting(tensor=2)
    sums = sums_of(layout, held, torch.float32)
    del sums[1]
    with pytest.raises(
        ValueError, match="the checksums of model.embed_tokens.weight speak for 320 of its 592 elements"
    ):
        tensor_checksums(layout, sums)


def test_a_rank_without_a_sum_for_each_piece_is_an_error() -> None:
    layout, held, _ = setting()
    sums = sums_of(layout, held, torch.float32)
    with pytest.raises(AssertionError, match=r"rank 0 has \d+ pieces, but gave \d+ checksums"):
        tensor_checksums(layout, {0: sums[0][:-1]})


def test_compare_names_what_differs_and_counts_the_rest() -> None:
    expected = {f"t{i}": i for i in range(9)}
    compare(expected, dict(expected), "replica 0")
    with pytest.raises(ValueError, match=r"weights of replica 3 differ .* in 1 of 9 tensors: t4$"):
        compare(expected, {**expected, "t4": 0}, "replica 3")
    with pytest.raises(ValueError, match=r"in 8 of 9 tensors: t1, t2, t3, t4, t5 and 3 more$"):
        compare(expected, {"t0": 0}, "replica 0")


def test_two_tensors_exchanged_are_both_named() -> None:
    layout, held, expected = setting()
    own = held[0]
    first, second = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.mlp.linear_fc1.weight"
    own[first], own[second] = own[second], own[first]
    names = ", ".join(f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 2) for p in ("gate", "up"))
    with pytest.raises(ValueError, match=f"in 4 of {len(expected)} tensors: {names}"):
        compare(expected, tensor_checksums(layout, sums_of(layout, held, torch.float32)), "replica 0")


def test_a_stale_tensor_is_named() -> None:
    layout, held, expected = setting(tensor=2)
    for own in held:
        own["decoder.layers.0.self_attention.linear_proj.weight"].mul_(1.5)
    with pytest.raises(ValueError, match=r"in 1 of \d+ tensors: model.layers.0.self_attn.o_proj.weight"):
        compare(expected, tensor_checksums(layout, sums_of(layout, held, torch.float32)), "replica 0")


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"),
    ],
)
def test_two_regions_swapped_in_a_plan_are_named(tensor: str, parameter: str) -> None:
    source, held, expected = setting(tensor=4)
    target = sglang_layout(declare(tiny_config()), 2, 1, 64)
    good = plan(source, target, 4)
    sums = tensor_checksums(target, sums_of(target, moved(source, held, target, good), torch.float32))
    compare(expected, sums, "replica 0")

    copies = list(good.copies)
    first, second = [i for i, c in enumerate(copies) if c.tensor == tensor and c.target_rank == 0][:2]
    assert copies[first].target_parameter == parameter
    copies[first], copies[second] = (
        copies[first]._replace(target=copies[second].target),
        copies[second]._replace(target=copies[first].target),
    )
    wrong = replace(good, buckets=(tuple(copies),))
    sums = tensor_checksums(target, sums_of(target, moved(source, held, target, wrong), torch.float32))
    with pytest.raises(ValueError, match=rf"weights of replica 0 differ .* in 1 of {len(expected)} tensors: {tensor}$"):
        compare(expected, sums, "replica 0")
