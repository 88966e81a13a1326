"""What a model family declares once: each weight's name in every world and how it is split. Every layout follows.

An op belongs to a canonical tensor (or several that real layouts fuse) and tells, for a world ("megatron", "sglang")
and a rank's seat in it, where rectangles of the canonical tensor lie. Ops are data: names and sizes, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from megarl.reshard.layout import Piece, Rect, Shape


@dataclass(frozen=True)
class Names:
    """One parameter's name in each world, without the prefix of its layer. `megatron_fused`: under Transformer Engine,
    which keeps a layer norm inside the linear layer that follows it."""

    megatron: str
    sglang: str
    megatron_fused: str = ""

    def of(self, world: World) -> str:
        if world.kind == "megatron":
            return self.megatron_fused if world.fused_norms and self.megatron_fused else self.megatron
        return self.sglang


@dataclass(frozen=True)
class World:
    """Where a layout is: which names and which rules for padding hold, and the sizes by which tensors are split."""

    kind: str
    """megatron or sglang."""
    tensor: int
    fused_norms: bool = False
    """Megatron with Transformer Engine, which also groups the experts of a rank in one module."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this."""
    expert: int = 1
    """Ranks over which the experts are spread."""
    expert_tensor: int = 1
    """Ranks over which one expert is split."""
    attention_copies: int = 1
    """SGLang's data-parallel attention: the tensor-parallel ranks are so many runs, and each run holds all of what is
    `of_attention`, split over its ranks."""

    def split(self, seat: Seat, of_attention: bool) -> tuple[int, int]:
        """(size, rank) of a tensor's split. World("sglang", 4, attention_copies=2).split(Seat(3), True) == (2, 1)"""
        size = self.tensor // self.attention_copies if of_attention else self.tensor
        return size, seat.tensor % size

    def padded_vocab_size(self, vocab_size: int) -> int:
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True, order=True)
class Seat:
    """Which part of each split a rank holds. Seat(tensor=1, expert=0): the second half of what tensor 2 splits, the
    first of the experts."""

    tensor: int
    expert: int = 0
    expert_tensor: int = 0


Placed = tuple[str, Shape, list[Piece]]
"""A parameter's name, its local shape, and the pieces in it."""


class Op(Protocol):
    """How one parameter of a family, or the parameters of several experts, are made of canonical tensors."""

    def tensors(self) -> Mapping[str, Shape]:
        """The canonical tensors, without the prefix of their layer, and their shapes."""

    def place(self, world: World, seat: Seat) -> list[Placed]:
        """The local parameters of the rank in that seat, with canonical names and their own without prefixes."""


@dataclass(frozen=True)
class Whole:
    """A tensor that every tensor-parallel rank holds whole: a norm, a router, a value head."""

    tensor: str
    names: Names
    shape: Shape

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, seat: Seat) -> list[Placed]:
        rows, cols = self.shape[0], self.shape[1] if len(self.shape) > 1 else 1
        name = self.names.of(world)
        return [(name, self.shape, [Piece(self.tensor, Rect(0, rows, 0, cols), name, 0, 0)])]


@dataclass(frozen=True)
class VocabSplit:
    """Rows are vocabulary entries, split over the tensor-parallel ranks after padding the vocabulary."""

    tensor: str
    names: Names
    shape: tuple[int, int]
    of_attention: bool = False
    """Over the ranks of one copy of the attention: an embedding is, whose rows are what its attention reads."""

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, seat: Seat) -> list[Placed]:
        vocab, hidden = self.shape
        padded, (size, rank) = world.padded_vocab_size(vocab), world.split(seat, self.of_attention)
        assert padded % size == 0, f"padded vocabulary {padded} is not divisible by tensor size {size}"
        rows = padded // size
        start, stop = rank * rows, min((rank + 1) * rows, vocab)
        name = self.names.of(world)
        pieces = [Piece(self.tensor, Rect(start, stop, 0, hidden), name, 0, 0)] if start < stop else []
        return [(name, (rows, hidden), pieces)]


@dataclass(frozen=True)
class RowSplit:
    """Split along the input: each rank holds a range of columns (Megatron's RowParallelLinear)."""

    tensor: str
    names: Names
    shape: tuple[int, int]
    of_attention: bool = False

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, seat: Seat) -> list[Placed]:
        rows, cols = self.shape
        size, rank = world.split(seat, self.of_attention)
        part = cols // size
        name = self.names.of(world)
        rect = Rect(0, rows, rank * part, (rank + 1) * part)
        return [(name, (rows, part), [Piece(self.tensor, rect, name, 0, 0)])]


@dataclass(frozen=True)
class GateUp:
    """Two tensors split along the output and stacked: each rank holds its part of the gate over its part of the up
    projection."""

    gate: str
    up: str
    names: Names
    shape: tuple[int, int]

    def tensors(self) -> Mapping[str, Shape]:
        return {self.gate: self.shape, self.up: self.shape}

    def place(self, world: World, seat: Seat) -> list[Placed]:
        rows, cols = self.shape
        part = rows // world.tensor
        name = self.names.of(world)
        rect = Rect(seat.tensor * part, (seat.tensor + 1) * part, 0, cols)
        return [(name, (2 * part, cols), [Piece(self.gate, rect, name, 0, 0), Piece(self.up, rect, name, part, 0)])]


@dataclass(frozen=True)
class QKV:
    """Query, key and value projections fused: Megatron interleaves them by query group, SGLang stacks [q; k; v] of the
    rank and repeats key/value heads where there are more ranks than heads. `cols` is the hidden size, or 1 for a bias.
    """

    query: str
    key: str
    value: str
    names: Names
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cols: int

    def tensors(self) -> Mapping[str, Shape]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            name: ((rows,) if self.cols == 1 else (rows, self.cols))
            for name, rows in ((self.query, q), (self.key, kv), (self.value, kv))
        }

    def place(self, world: World, seat: Seat) -> list[Placed]:
        name = self.names.of(world)
        spans_of = self._megatron if world.kind == "megatron" else self._sglang
        spans = list(spans_of(*world.split(seat, of_attention=True)))
        pieces, row = [], 0
        for tensor, start, count in spans:
            pieces.append(Piece(tensor, Rect(start, start + count, 0, self.cols), name, row, 0))
            row += count
        return [(name, ((row,) if self.cols == 1 else (row, self.cols)), pieces)]

    def _megatron(self, size: int, rank: int) -> Iterator[tuple[str, int, int]]:
        groups, per_group = self.num_kv_heads // size, self.num_heads // self.num_kv_heads * self.head_dim
        for group in range(rank * groups, (rank + 1) * groups):
            yield self.query, group * per_group, per_group
            yield self.key, group * self.head_dim, self.head_dim
            yield self.value, group * self.head_dim, self.head_dim

    def _sglang(self, size: int, rank: int) -> Iterator[tuple[str, int, int]]:
        q_rows = self.num_heads // size * self.head_dim
        kv_heads = max(self.num_kv_heads // size, 1)
        first = rank * self.num_kv_heads // size
        yield self.query, rank * q_rows, q_rows
        yield self.key, first * self.head_dim, kv_heads * self.head_dim
        yield self.value, first * self.head_dim, kv_heads * self.head_dim


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer: each is a gated feed-forward, spread over the expert-parallel ranks in runs and
    split over the expert-tensor ranks.

    Names in {}: the expert's number, global in `gate`, `up` and `down`, local in Megatron's. Megatron has two
    parameters an expert (sequential: a module each; grouped, with Transformer Engine: one module for all). SGLang has
    two for all experts of a rank: [experts, 2 x ffn / expert_tensor, hidden] and
    [experts, hidden, ffn / expert_tensor].
    """

    gate: str
    up: str
    down: str
    megatron: tuple[str, str]
    """Of [gate; up] and down."""
    megatron_grouped: tuple[str, str]
    sglang: tuple[str, str]
    num_experts: int
    ffn_size: int
    hidden_size: int

    def tensors(self) -> Mapping[str, Shape]:
        shapes: dict[str, Shape] = {}
        for expert in range(self.num_experts):
            shapes[self.gate.format(expert)] = shapes[self.up.format(expert)] = (self.ffn_size, self.hidden_size)
            shapes[self.down.format(expert)] = (self.hidden_size, self.ffn_size)
        return shapes

    def place(self, world: World, seat: Seat) -> list[Placed]:
        count, part = self.num_experts // world.expert, self.ffn_size // world.expert_tensor
        first = seat.expert * count
        rows = Rect(seat.expert_tensor * part, (seat.expert_tensor + 1) * part, 0, self.hidden_size)
        cols = Rect(0, self.hidden_size, rows.row0, rows.row1)

        def of_expert(local: int, above: int, fused: str, down: str) -> tuple[list[Piece], list[Piece]]:
            """The pieces of one expert; `above`: the experts that lie above it in the same parameters."""
            gate, up = (name.format(first + local) for name in (self.gate, self.up))
            row = above * 2 * part
            return (
                [Piece(gate, rows, fused, row, 0), Piece(up, rows, fused, row + part, 0)],
                [Piece(self.down.format(first + local), cols, down, above * self.hidden_size, 0)],
            )

        if world.kind == "megatron":
            names = self.megatron_grouped if world.fused_norms else self.megatron
            placed: list[Placed] = []
            for local in range(count):
                fused, down = (name.format(local) for name in names)
                into, out = of_expert(local, 0, fused, down)
                placed += [(fused, (2 * part, self.hidden_size), into), (down, (self.hidden_size, part), out)]
            return placed
        pairs = [of_expert(local, local, *self.sglang) for local in range(count)]
        fused, down = self.sglang
        return [
            (fused, (count, 2 * part, self.hidden_size), [piece for into, _ in pairs for piece in into]),
            (down, (count, self.hidden_size, part), [piece for _, out in pairs for piece in out]),
        ]


@dataclass(frozen=True)
class Declaration:
    """A model's weights: the ops outside the layers, the ops of each layer, and the prefixes of the layers.

    The canonical prefix of layer 3 is "model.layers.3.", Megatron's "decoder.layers.3.", SGLang's "model.layers.3.".
    """

    num_heads: int
    num_kv_heads: int
    ffn_size: int
    """Of the dense layers; 0: there are none."""
    vocab_size: int
    embedding: VocabSplit
    layers: tuple[tuple[Op, ...], ...]
    final_norm: Whole
    head: Op | None
    """The output layer; None where it is tied to the embedding."""
    num_experts: int = 0
    """Routed experts of each layer that has them; 0: none has."""
    expert_ffn_size: int = 0
    copies_attention: bool = False
    """SGLang's model of the family splits its attention over the ranks of one copy (attn_tp_size in models/qwen3.py and
    models/qwen3_moe.py, 0.5.21). Those of other families split it over all ranks (models/llama.py, models/qwen2.py),
    which loads with data-parallel attention too, and answers wrongly."""
    layer_prefix: str = "model.layers.{}."
    megatron_layer_prefix: str = "decoder.layers.{}."

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def tensors(self) -> dict[str, Shape]:
        """Every canonical tensor and its shape, in the order of the model."""
        shapes: dict[str, Shape] = dict(self.embedding.tensors())
        for index, layer in enumerate(self.layers):
            for op in layer:
                shapes.update({self.layer_prefix.format(index) + name: shape for name, shape in op.tensors().items()})
        shapes.update(self.final_norm.tensors())
        if self.head is not None:
            shapes.update(self.head.tensors())
        return shapes
