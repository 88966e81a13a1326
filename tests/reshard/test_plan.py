"""Plans and their execution, over random models and layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import CPU, Parameters, allocate, assert_equal, distinct, execute, network
from tiny_models import declarations, megatron, megatron_layouts, sglang_layouts, tiny_config

from megarl.model.families import declare
from megarl.reshard.executor import Executor, bucket_layouts
from megarl.reshard.layout import Layout, Piece, Rect, Shard
from megarl.reshard.layouts import hf_files_layout, hf_layout, sglang_layout
from megarl.reshard.plan import ALIGNMENT, Copy, Place, ReshardPlan, Summary, plan

many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def part(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    return matrix(tensor)[rect.row0 : rect.row1, rect.col0 : rect.col1]


def filled(layout: Layout, values: Parameters) -> list[Parameters]:
    """Every rank's parameters by the layout's definition: each piece is its rectangle of the canonical tensor."""
    parameters = allocate(layout, next(iter(values.values())).dtype)
    for rank, own in enumerate(parameters):
        for piece in layout.shard(rank).pieces:
            target = matrix(own[piece.parameter])
            rows, cols = piece.rect.num_rows, piece.rect.num_cols
            target[piece.row : piece.row + rows, piece.col : piece.col + cols] = part(values[piece.tensor], piece.rect)
    return parameters


@st.composite
def places(draw: st.DrawFn, num_ranks: int, per_gpu: int = 1) -> list[Place]:
    """per_gpu ranks of one layout on each GPU, on nodes of 1 to 4 GPUs, the first node drawn too."""
    per_node, first = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 2))
    return [Place(first + rank // per_gpu // per_node, rank // per_gpu % per_node) for rank in range(num_ranks)]


@st.composite
def plans(draw: st.DrawFn, bucket_bytes: Sequence[int] = (256, 400, 2048, 1 << 20), per_gpu: int = 1) -> ReshardPlan:
    declaration = draw(declarations())
    source = draw(megatron_layouts(declaration))
    target = draw(
        st.one_of(
            megatron_layouts(declaration),
            sglang_layouts(declaration),
            st.builds(hf_layout, st.just(declaration), st.integers(1, 3)),
            st.builds(hf_files_layout, st.just(declaration), st.integers(1, 3)),
        )
    )
    where = draw(places(source.num_ranks, per_gpu)), draw(places(target.num_ranks, per_gpu))
    return plan(source, target, 4, *where, bucket_bytes=draw(st.sampled_from(bucket_bytes)))


# ------------------------------------------------------------------------------------------------ what arrives


@many
@given(plans())
def test_every_target_element_is_written_once_with_the_canonical_value(made: ReshardPlan) -> None:
    values = distinct(made.source.tensors, torch.float32)
    targets = allocate(made.target, torch.float32)
    execute(made, torch.float32, filled(made.source, values), targets)
    for rank, expected in enumerate(filled(made.target, values)):
        assert_equal(targets[rank], expected, f"rank {rank}")
        writes = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        for copy in made.copies:
            if copy.target_rank == rank:
                part(writes[copy.target_parameter], copy.target).add_(1)
        for name, count in writes.items():
            assert torch.equal(count, (expected[name] != -1).float()), name


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_hf_to_megatron_to_megatron_to_sglang_to_hf_is_the_identity(data: st.DataObject, dtype: torch.dtype) -> None:
    declaration = data.draw(declarations())
    chain = [
        hf_layout(declaration),
        data.draw(megatron_layouts(declaration)),
        data.draw(megatron_layouts(declaration)),
        data.draw(sglang_layouts(declaration)),
        hf_files_layout(declaration, 2),
    ]
    values = distinct(declaration.tensors(), dtype)
    held = [dict(values)]
    for source, target in zip(chain, chain[1:], strict=False):
        arrived = allocate(target, dtype)
        made = plan(source, target, dtype.itemsize, bucket_bytes=data.draw(st.sampled_from([512, 1 << 20])))
        execute(made, dtype, held, arrived)
        held = arrived
    assert_equal({name: tensor for file in held for name, tensor in file.items()}, values)


def test_a_wire_type_that_is_not_the_parameters_casts() -> None:
    declaration = declare(tiny_config())
    source, _ = megatron(declaration, tensor=2)
    target = sglang_layout(declaration, 2, 1, 64)
    values = {n: torch.randn(s) for n, s in declaration.tensors().items()}
    arrived = allocate(target, torch.bfloat16)
    execute(plan(source, target, 2), torch.bfloat16, filled(source, values), arrived)
    expected = filled(target, {n: v.bfloat16() for n, v in values.items()})
    for rank in range(2):
        assert_equal(arrived[rank], expected[rank])


def test_executors_share_nothing_but_messages_and_run_again_and_again() -> None:
    declaration = declare(tiny_config())
    source, target = megatron(declaration, pipeline=2)[0], hf_layout(declaration, 2)
    made = plan(source, target, 4, bucket_bytes=4096)
    for seed in (1.0, 2.0):
        values = {n: v + seed for n, v in distinct(declaration.tensors(), torch.float32).items()}
        arrived = allocate(target, torch.float32)
        execute(made, torch.float32, filled(source, values), arrived)
        for rank in range(2):
            assert_equal(arrived[rank], values)


# ------------------------------------------------------------------------------------------------ who sends


def distance(source: Place, target: Place) -> int:
    return 0 if source == target else 1 if source.node == target.node else 2


@many
@given(plans())
def test_no_region_crosses_twice_to_a_gpu_and_the_nearest_holder_sends(made: ReshardPlan) -> None:
    holders: dict[tuple[str, Rect], list[int]] = defaultdict(list)
    for rank in range(made.source.num_ranks):
        for piece in made.source.shard(rank).pieces:
            holders[piece.tensor, piece.rect].append(rank)
    arrived: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in made.copies:
        where = made.target_places[copy.target_rank]
        able = [
            rank
            for (tensor, rect), ranks in holders.items()
            if tensor == copy.tensor and rect.intersect(copy.rect) == copy.rect
            for rank in ranks
        ]
        nearest = min(distance(made.source_places[rank], where) for rank in able)
        assert copy.source_rank in able
        assert distance(made.source_places[copy.source_rank], where) == nearest
        arrived[copy.target_rank, copy.tensor].append(copy)
    for copies in arrived.values():
        rects = [copy.rect for copy in copies]
        assert not any(a.intersect(b) for i, a in enumerate(rects) for b in rects[:i]), "a region comes twice"


def crossing_elements(made: ReshardPlan) -> int:
    """Element by element: needed at a place, and not held by a source there."""
    count = 0
    for place in set(made.target_places):
        needed, held = ({name: torch.zeros(shape) for name, shape in made.target.tensors.items()} for _ in range(2))
        for marks, layout, where in (
            (needed, made.target, made.target_places),
            (held, made.source, made.source_places),
        ):
            for rank in (rank for rank, at in enumerate(where) if at == place):
                for piece in layout.shard(rank).pieces:
                    part(marks[piece.tensor], piece.rect).fill_(1)
        count += sum(int((needed[name] > held[name]).sum()) for name in needed)
    return count


@many
@given(plans())
def test_no_byte_crosses_a_link_that_need_not(made: ReshardPlan) -> None:
    summary = made.summary()
    assert summary.intra_node + summary.inter_node == summary.crossing_lower_bound == 4 * crossing_elements(made)
    assert summary.local + summary.crossing_lower_bound == summary.written


@many
@given(plans(per_gpu=2))
def test_what_two_targets_of_a_gpu_need_counts_once(made: ReshardPlan) -> None:
    summary = made.summary()
    assert summary.intra_node + summary.inter_node >= summary.crossing_lower_bound == 4 * crossing_elements(made)


def sent_bytes(made: ReshardPlan) -> list[int]:
    sent = [0] * made.source.num_ranks
    for copy in made.copies:
        sent[copy.source_rank] += copy.rect.size * made.itemsize
    return sent


@pytest.mark.parametrize(("tensor", "data", "size", "replicas"), [(2, 4, 2, 4), (1, 8, 2, 4), (4, 2, 1, 8)])
def test_load_spreads_over_equally_far_replicas(tensor: int, data: int, size: int, replicas: int) -> None:
    declaration = declare(tiny_config(num_hidden_layers=8, vocab_size=40))
    source, _ = megatron(declaration, tensor=tensor, data=data)
    target = sglang_layout(declaration, size, replicas, 64)
    here, there = [Place(0, r) for r in range(8)], [Place(1, r) for r in range(8)]
    made = plan(source, target, 4, here, there)
    sent = sent_bytes(made)
    assert max(sent) - min(sent) <= max(copy.rect.size * 4 for copy in made.copies)


def test_a_norm_comes_from_the_targets_own_gpu_whichever_tensor_rank_that_is() -> None:
    declaration = declare(tiny_config())
    source, _ = megatron(declaration, tensor=4)
    made = plan(source, hf_layout(declaration, 4), 4)
    norms = [copy for copy in made.copies if "norm" in copy.tensor]
    assert len(norms) == 4 * 9
    assert all(copy.source_rank == copy.target_rank for copy in norms)


def test_a_tied_embedding_comes_from_the_nearer_of_the_first_and_the_last_stage() -> None:
    declaration = declare(tiny_config(tied=True))
    source, _ = megatron(declaration, pipeline=2)
    made = plan(source, hf_layout(declaration, 2), 4)
    found = {(c.target_rank, c.source_rank, c.source_parameter) for c in made.copies if "embed" in c.tensor}
    assert found == {(0, 0, "embedding.word_embeddings.weight"), (1, 1, "output_layer.weight")}


def test_a_colocated_layout_like_the_sources_moves_nothing_between_gpus() -> None:
    declaration = declare(tiny_config())
    source, _ = megatron(declaration, tensor=2, data=2)
    target = sglang_layout(declaration, 2, 2, 8)
    summary = plan(source, target, 4).summary()
    assert (summary.intra_node, summary.inter_node) == (0, 0)
    assert summary.local == summary.written > 0
    assert summary.crossing_lower_bound == 0


@many
@given(st.data())
def test_plans_are_deterministic(data: st.DataObject) -> None:
    declaration = data.draw(declarations())
    source, target = data.draw(megatron_layouts(declaration)), data.draw(sglang_layouts(declaration))
    first, second = (plan(source, target, 2, bucket_bytes=512) for _ in range(2))
    assert first == second


# ------------------------------------------------------------------------------------------------ buckets


@many
@given(st.data(), st.sampled_from([1, 2]))
def test_no_gpu_receives_and_packs_more_than_a_bucket(data: st.DataObject, per_gpu: int) -> None:
    bucket_bytes = data.draw(st.sampled_from([208, 300, 1024]))
    made = data.draw(plans([bucket_bytes], per_gpu))
    largest = 0
    for bucket in made.buckets:
        layouts = bucket_layouts(bucket, torch.float32)
        assert layouts
        held: dict[Place, int] = defaultdict(int)
        elements: dict[Place, int] = defaultdict(int)
        for target, layout in layouts.items():
            where = made.target_places[target]
            assert layout.num_bytes > 0
            held[where] += layout.num_bytes
            elements[where] += sum(copy.rect.size for span in layout.spans for copy in span.copies)
            for span in layout.spans:
                assert span.start % ALIGNMENT == 0
                sender = made.source_places[span.source_rank]
                if sender != where:
                    held[sender] += span.stop - span.start
                    elements[sender] += sum(copy.rect.size for copy in span.copies)
        assert max(held.values()) <= bucket_bytes
        largest = max(largest, *elements.values())
    assert made.summary().peak_buffer == 4 * largest
    whole = plan(made.source, made.target, 4, made.source_places, made.target_places)
    assert sum(c.rect.size for c in whole.copies) == sum(c.rect.size for c in made.copies)


def test_a_row_larger_than_a_bucket_has_one_of_its_own() -> None:
    declaration = declare(tiny_config(num_hidden_layers=1))
    made = plan(hf_layout(declaration), hf_layout(declaration), 4, bucket_bytes=80)  # rows of 16 or 24 elements
    rows = [bucket for bucket in made.buckets if any("down_proj" in copy.tensor for copy in bucket)]
    assert len(rows) == 16
    assert all(len(bucket) == 1 for bucket in rows)


@many
@given(plans())
def test_regions_of_a_bucket_do_not_overlap(made: ReshardPlan) -> None:
    for bucket in made.buckets:
        for layout in bucket_layouts(bucket, torch.float32).values():
            ends = sorted((r.offset, r.offset + r.nbytes) for r in layout.regions)
            assert all(stop <= start for (_, stop), (start, _) in zip(ends, ends[1:], strict=False))
            assert ends[-1][1] <= layout.num_bytes
            spans = {(s.start, s.stop) for s in layout.spans}
            assert all(any(a <= start and stop <= b for a, b in spans) for start, stop in ends)


def test_a_bucket_smaller_than_a_tensor_cuts_it_by_rows() -> None:
    declaration = declare(tiny_config())
    made = plan(hf_layout(declaration), hf_layout(declaration), 4, bucket_bytes=3 * 16 * 4 + ALIGNMENT)
    cuts = [copy.rect for copy in made.copies if copy.tensor == "model.embed_tokens.weight"]
    assert cuts == [Rect(row, min(row + 3, 37), 0, 16) for row in range(0, 37, 3)]


def test_every_pipeline_stage_sends_in_the_first_bucket() -> None:
    declaration = declare(tiny_config(num_hidden_layers=8))
    source, _ = megatron(declaration, pipeline=4)
    target = sglang_layout(declaration, 1, 1, 64)
    made = plan(source, target, 4, target_places=[Place(1, 0)], bucket_bytes=12_000)
    assert len(made.buckets) > 2
    assert {copy.source_rank for copy in made.buckets[0]} == {0, 1, 2, 3}


def test_buckets_of_a_sender_that_serves_many_targets_stay_small() -> None:
    """One rank holds the model and eight engines on other nodes want it: it packs one bucket at a time, not eight."""
    declaration = declare(tiny_config())
    source, _ = megatron(declaration)
    made = plan(source, hf_layout(declaration, 8), 4, target_places=[Place(1, r) for r in range(8)], bucket_bytes=8192)
    with network() as fake:
        own = Executor(made, torch.float32, 0, range(1, 9), CPU)
        fake.here.rank = 0
        parameters = filled(source, distinct(declaration.tensors(), torch.float32))[0]
        for bucket in range(own.num_buckets):
            fake.messages.clear()
            own.exchange(bucket, parameters, {})
            assert 0 < sum(size for _, _, size in fake.messages) <= 8192
        fake.sent.clear()


# ------------------------------------------------------------------------------------------------ summary and errors


def hand_made() -> ReshardPlan:
    """w [4, 2] in halves on two GPUs of node 0; wanted whole on the first, its first half on node 1, its second on a
    third GPU of node 0."""
    tensors = {"w": (4, 2)}
    first = Shard({"a": (2, 2)}, (Piece("w", Rect(0, 2, 0, 2), "a", 0, 0),))
    second = Shard({"a": (2, 2)}, (Piece("w", Rect(2, 4, 0, 2), "a", 0, 0),))
    whole = Shard(tensors, (Piece("w", Rect(0, 4, 0, 2), "w", 0, 0),))
    source = Layout("halves", tensors, (first, second), (0, 1))
    target = Layout("three", tensors, (whole, first, second), (0, 1, 2))
    return plan(source, target, 2, [Place(0, 0), Place(0, 1)], [Place(0, 0), Place(1, 0), Place(0, 2)])


def test_summary_by_hand() -> None:
    summary = hand_made().summary()
    # A half is 2 x 2 elements of 2 bytes. Local: the first half on GPU 0. Within node 0: the second half to GPU 0 and
    # to GPU 2. Between nodes: the first half to node 1. GPU 0 receives two halves and packs the first for node 1; GPU 1
    # packs the second twice.
    assert summary == Summary(
        local=8, intra_node=16, inter_node=8, crossing_lower_bound=24, written=32, peak_buffer=24, num_buckets=1
    )
    assert str(summary) == (
        "1 bucket; local 0.0 MB, within nodes 0.0 MB, between nodes 0.0 MB (at least 0.0 MB must leave a GPU); written "
        "0.0 MB; largest bucket 0.0 MB a GPU"
    )


def test_a_region_that_two_targets_of_one_gpu_need_must_cross_once() -> None:
    made = hand_made()
    shared = plan(made.source, made.target, 2, made.source_places, [Place(0, 0), Place(1, 0), Place(0, 0)])
    summary = shared.summary()
    # The second half goes to GPU 0 for the first and for the third target.
    assert (summary.local, summary.intra_node, summary.inter_node) == (8, 16, 8)
    assert summary.crossing_lower_bound == 16


def test_copies_by_hand() -> None:
    lower = Rect(2, 4, 0, 2)
    assert hand_made().copies == (
        Copy("w", Rect(0, 2, 0, 2), 0, "a", Rect(0, 2, 0, 2), 0, "w", Rect(0, 2, 0, 2)),
        Copy("w", lower, 1, "a", Rect(0, 2, 0, 2), 0, "w", lower),
        Copy("w", Rect(0, 2, 0, 2), 0, "a", Rect(0, 2, 0, 2), 1, "a", Rect(0, 2, 0, 2)),
        Copy("w", lower, 1, "a", Rect(0, 2, 0, 2), 2, "a", Rect(0, 2, 0, 2)),
    )


def test_a_tensor_that_the_source_lacks_is_named() -> None:
    tied, untied = (declare(tiny_config(tied=tied)) for tied in (True, False))
    with pytest.raises(ValueError, match="sglang tp1 x 1 needs lm_head.weight, which hf does not have"):
        plan(hf_layout(tied), sglang_layout(untied, 1, 1, 64), 2)


def test_a_tensor_of_another_shape_is_named() -> None:
    small, large = (declare(tiny_config(vocab_size=size)) for size in (37, 38))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[37, 16\] in hf, but \[38, 16\] in sglang"):
        plan(hf_layout(small), sglang_layout(large, 1, 1, 64), 2)


def test_a_part_that_no_source_rank_holds_is_named() -> None:
    made = hand_made()
    half = Layout("half", made.source.tensors, made.source.shards[:1], (0,))
    with pytest.raises(ValueError, match=r"w Rect\(.*\): the source holds 4 of its 8 elements"):
        plan(half, made.target, 2)


def test_an_executor_knows_the_buckets_of_the_targets_that_it_hosts_only() -> None:
    own = Executor(hand_made(), torch.float16, 1, [0, 1, 1], CPU)
    assert own.targets() == [1, 2]
    layout = own.layout(0, 1)
    assert layout is not None
    assert (layout.num_bytes, [span.source_rank for span in layout.spans]) == (16, [0])  # 8 bytes, aligned to 16
    with pytest.raises(AssertionError, match="target rank 0 is hosted by 0"):
        own.layout(0, 0)


def test_an_executor_refuses_a_type_that_the_plan_does_not_count() -> None:
    with pytest.raises(AssertionError, match="the plan counts 2 bytes an element, torch.float32 has 4"):
        Executor(hand_made(), torch.float32, 0, [0, 0, 0], CPU)


def test_a_plan_for_64_ranks_of_a_7b_model_takes_about_a_second() -> None:
    import time

    llama = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    declaration = declare(SimpleNamespace(model_type="llama", tie_word_embeddings=False, **llama, **heads))
    source, _ = megatron(declaration, vocab=512, tensor=4, pipeline=4, data=4)
    target = sglang_layout(declaration, 4, 16, 64)
    where = [Place(rank // 8, rank % 8) for rank in range(64)]
    start = time.process_time()
    made = plan(source, target, 2, where, where)
    assert time.process_time() - start < 4  # 0.4 s on an idle core
    assert made.summary().written == sum(c.rect.size for c in made.copies) * 2
