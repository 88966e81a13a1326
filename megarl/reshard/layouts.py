"""The three worlds' layouts, each derived from a family's declaration and the parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megarl.config import ParallelConfig
from megarl.parallel.topology import RankGrid, stage_layers
from megarl.reshard.declaration import Declaration, Names, Placed, Seat, VocabSplit, World
from megarl.reshard.layout import Layout, Piece, Rect, Shape, Shard, as_matrix

SGLANG_VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)."""


def hf_layout(declaration: Declaration, num_copies: int = 1) -> Layout:
    """Every rank holds every tensor whole, under its name on disk: an embedded transformers model, or one file."""
    tensors = declaration.tensors()
    shard = _whole_shard(tensors)
    return Layout("hf", tensors, (shard,), (0,) * num_copies, tuple(range(num_copies)))


def hf_files_layout(declaration: Declaration, num_files: int) -> Layout:
    """The tensors of a checkpoint spread over files of about the same size, in the order of the model."""
    tensors = declaration.tensors()
    total = sum(math.prod(s) for s in tensors.values())
    groups: list[dict[str, Shape]] = [{} for _ in range(num_files)]
    seen = 0
    for name, shape in tensors.items():
        groups[min(seen * num_files // max(total, 1), num_files - 1)][name] = shape
        seen += math.prod(shape)
    shards = tuple(_whole_shard(g) for g in groups if g)  # none starts within a file's share: a tensor larger than it
    return Layout(f"hf in {len(shards)} files", tensors, shards, tuple(range(len(shards))))


def _whole_shard(tensors: Mapping[str, Shape]) -> Shard:
    def whole(name: str, shape: Shape) -> Piece:
        rows, cols = as_matrix(shape)
        return Piece(name, Rect(0, rows, 0, cols), name, 0, 0)

    return Shard(tensors, tuple(whole(n, s) for n, s in tensors.items()))


def megatron_layout(declaration: Declaration, grid: RankGrid, vocab_multiple: int, fused_norms: bool) -> Layout:
    """Megatron-Core's layout over the ranks of a role: tensor parallel splits, layers by pipeline and virtual stage,
    experts by expert and expert-tensor rank, the tied embedding on the first and the last stage, replicas over data and
    context parallel.

    Parameters carry global layer numbers: decoder.layers.<layer>.<name>; experts their local ones.

    Raises:
        ValueError: a size does not divide what it splits, or the layers do not split over the stages.
    """
    parallel = grid.parallel
    world = World("megatron", parallel.tensor, fused_norms, vocab_multiple, parallel.expert, parallel.expert_tensor)
    check_sizes(declaration, world)
    keys = []
    for rank in range(grid.num_ranks):
        here = grid.coordinates(rank)
        keys.append((here.pipeline, Seat(here.tensor, here.expert, here.expert_tensor)))
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    shards = tuple(_megatron_shard(declaration, parallel, world, stage, seat) for stage, seat in order)
    name = f"megatron tp{parallel.tensor} pp{parallel.pipeline} cp{parallel.context} dp{grid.data_parallel_size}"
    if declaration.num_experts:
        name += f" ep{parallel.expert} etp{parallel.expert_tensor}"
    return Layout(name, declaration.tensors(), shards, tuple(order[key] for key in keys))


def _megatron_shard(declaration: Declaration, parallel: ParallelConfig, world: World, stage: int, seat: Seat) -> Shard:
    first, last = stage == 0, stage == parallel.pipeline - 1
    placed: list[Placed] = []
    if first:
        placed += declaration.embedding.place(world, seat)
    for chunk in range(parallel.virtual_pipeline):
        for index in stage_layers(declaration.num_layers, parallel, stage, chunk):
            placed += _layer(declaration, world, seat, index, declaration.megatron_layer_prefix)
    if last:
        placed += declaration.final_norm.place(world, seat)
        if declaration.head is not None:
            placed += declaration.head.place(world, seat)
        elif not first:
            placed += _tied_head(declaration.embedding).place(world, seat)
    return _shard(placed)


def _tied_head(embedding: VocabSplit) -> VocabSplit:
    """The copy of a tied embedding that the last pipeline stage keeps as its output layer."""
    return VocabSplit(embedding.tensor, Names("output_layer.weight", ""), embedding.shape)


def sglang_layout(
    declaration: Declaration,
    tensor: int,
    num_replicas: int,
    vocab_multiple: int,
    expert: int = 1,
    data_parallel: int = 1,
    data_parallel_head: bool = False,
) -> Layout:
    """SGLang's own parameters on each tensor-parallel rank of each replica: rank r of all is rank r % tensor of replica
    r // tensor. expert: SGLang's ep_size, which divides tensor: of the ranks of a replica each run of tensor / expert
    holds the same experts, each split over the run. data_parallel: SGLang's dp_size with enable_dp_attention, which
    divides tensor: each run of tensor / data_parallel ranks holds a copy of the attention and the embedding, split over
    the run; data_parallel_head: of the output layer too (enable_dp_lm_head).

    Raises:
        ValueError: a size does not divide what it splits, only some of the layers have experts, or SGLang cannot
            have the data-parallel attention or head with this model.
    """
    if declaration.num_experts and declaration.ffn_size:
        raise ValueError(
            "some layers of the model have experts and some have none (mlp_only_layers, decoder_sparse_step), but "
            "SGLang builds experts in all layers of such a model (models/qwen3_moe.py, 0.5.21); use rollout.engine=hf"
        )
    if tensor % expert:
        raise ValueError(f"sglang expert size {expert} does not divide its tensor size {tensor}; use a size that does")
    if data_parallel > 1 and not declaration.copies_attention:
        raise ValueError(
            f"sglang data-parallel size {data_parallel}, but SGLang (0.5.21) splits the attention of this model's "
            "family over all ranks; qwen3 and qwen3_moe have data-parallel attention; set it to 1"
        )
    if tensor % data_parallel:
        raise ValueError(
            f"sglang data-parallel size {data_parallel} does not divide its tensor size {tensor}; use a size that does"
        )
    if data_parallel_head and tensor > data_parallel and declaration.vocab_size % vocab_multiple:
        raise ValueError(
            f"sglang's data-parallel head over groups of {tensor // data_parallel} ranks needs a vocabulary that is a "
            f"multiple of {vocab_multiple}, but the model's is {declaration.vocab_size}: SGLang (0.5.21) gathers its "
            "logits without the padding (layers/logits_processor.py); turn it off"
        )
    expert_tensor = tensor // expert
    world = World(
        "sglang",
        tensor,
        vocab_multiple=vocab_multiple,
        expert=expert,
        expert_tensor=expert_tensor,
        attention_copies=data_parallel,
    )
    check_sizes(declaration, world)
    head = declaration.head
    if data_parallel_head and isinstance(head, VocabSplit):
        head = replace(head, of_attention=True)
    shards = []
    for rank in range(tensor):
        seat = Seat(rank, *divmod(rank, expert_tensor))
        placed = declaration.embedding.place(world, seat)
        for index in range(declaration.num_layers):
            placed += _layer(declaration, world, seat, index, declaration.layer_prefix)
        placed += declaration.final_norm.place(world, seat)
        if head is not None:
            placed += head.place(world, seat)
        shards.append(_shard(placed))
    ranks = range(tensor * num_replicas)
    return Layout(
        f"sglang tp{tensor}{f' ep{expert}' if expert > 1 else ''}{f' dp{data_parallel}' if data_parallel > 1 else ''} "
        f"x {num_replicas}",
        declaration.tensors(),
        tuple(shards),
        tuple(r % tensor for r in ranks),
        tuple(r // tensor for r in ranks),
    )


def _layer(declaration: Declaration, world: World, seat: Seat, index: int, prefix: str) -> Iterable[Placed]:
    canonical, local = declaration.layer_prefix.format(index), prefix.format(index)
    for op in declaration.layers[index]:
        for name, shape, pieces in op.place(world, seat):
            yield (
                local + name,
                shape,
                [Piece(canonical + p.tensor, p.rect, local + p.parameter, p.row, p.col) for p in pieces],
            )


def _shard(placed: Iterable[Placed]) -> Shard:
    parameters: dict[str, Shape] = {}
    pieces: list[Piece] = []
    for name, shape, parts in placed:
        assert name not in parameters, f"two ops place {name}"
        parameters[name] = shape
        pieces += parts
    return Shard(parameters, tuple(pieces))


def check_sizes(declaration: Declaration, world: World) -> None:
    """Raises:
    ValueError: where a parallel size does not divide what it splits, naming the sizes.
    """
    size, kv_heads, vocab = world.tensor, declaration.num_kv_heads, world.padded_vocab_size(declaration.vocab_size)
    attention = size // world.attention_copies
    attention_axis = "tensor" if world.attention_copies == 1 else "tensor / data-parallel"
    kv_fits = kv_heads % attention == 0 or (world.kind == "sglang" and attention % kv_heads == 0)
    experts, expert_ffn = declaration.num_experts, declaration.expert_ffn_size
    for axis, axis_size, what, number, fits in (
        (attention_axis, attention, "attention heads", declaration.num_heads, declaration.num_heads % attention == 0),
        (attention_axis, attention, "key/value heads", kv_heads, kv_fits),
        ("tensor", size, "feed-forward size", declaration.ffn_size, declaration.ffn_size % size == 0),
        ("tensor", size, "rows of the padded vocabulary", vocab, vocab % size == 0),
        ("expert", world.expert, "experts", experts, experts % world.expert == 0),
        (
            "expert tensor",
            world.expert_tensor,
            "expert feed-forward size",
            expert_ffn,
            expert_ffn % world.expert_tensor == 0,
        ),
    ):
        if not fits:
            raise ValueError(
                f"{world.kind} {axis} size {axis_size} does not divide the model's {number} {what}; use a size that "
                "does"
            )
