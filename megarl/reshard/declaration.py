"""What a model family declares once: each weight's name in every world and how it is split. Every layout follows.

An op belongs to a canonical tensor (or several that real layouts fuse) and yields, for a world ("megatron", "sglang")
and a tensor-parallel rank, where rectangles of the canonical tensor lie. Ops are data: names and sizes, nothing else.
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
    """Where a layout is: which names and which rules for padding hold, and the tensor-parallel size."""

    kind: str
    """megatron or sglang."""
    tensor: int
    fused_norms: bool = False
    """Megatron with Transformer Engine."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this."""

    def padded_vocab_size(self, vocab_size: int) -> int:
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


Placed = tuple[str, Shape, list[Piece]]
"""A parameter's name, its local shape, and the pieces in it."""


class Op(Protocol):
    """How one parameter of a family is made of canonical tensors."""

    def tensors(self) -> Mapping[str, Shape]:
        """The canonical tensors, without the prefix of their layer, and their shapes."""

    def place(self, world: World, rank: int) -> Placed:
        """The local parameter on tensor-parallel rank `rank`, with canonical names and its own without prefixes."""


@dataclass(frozen=True)
class Whole:
    """A tensor that every tensor-parallel rank holds whole: a norm, a router, a value head."""

    tensor: str
    names: Names
    shape: Shape

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, rank: int) -> Placed:
        rows, cols = self.shape[0], self.shape[1] if len(self.shape) > 1 else 1
        name = self.names.of(world)
        return name, self.shape, [Piece(self.tensor, Rect(0, rows, 0, cols), name, 0, 0)]


@dataclass(frozen=True)
class VocabSplit:
    """Rows are vocabulary entries, split over the tensor-parallel ranks after padding the vocabulary."""

    tensor: str
    names: Names
    shape: tuple[int, int]

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, rank: int) -> Placed:
        vocab, hidden = self.shape
        padded = world.padded_vocab_size(vocab)
        assert padded % world.tensor == 0, f"padded vocabulary {padded} is not divisible by tensor size {world.tensor}"
        rows = padded // world.tensor
        start, stop = rank * rows, min((rank + 1) * rows, vocab)
        name = self.names.of(world)
        pieces = [Piece(self.tensor, Rect(start, stop, 0, hidden), name, 0, 0)] if start < stop else []
        return name, (rows, hidden), pieces


@dataclass(frozen=True)
class RowSplit:
    """Split along the input: each rank holds a range of columns (Megatron's RowParallelLinear)."""

    tensor: str
    names: Names
    shape: tuple[int, int]

    def tensors(self) -> Mapping[str, Shape]:
        return {self.tensor: self.shape}

    def place(self, world: World, rank: int) -> Placed:
        rows, cols = self.shape
        part = cols // world.tensor
        name = self.names.of(world)
        return name, (rows, part), [Piece(self.tensor, Rect(0, rows, rank * part, (rank + 1) * part), name, 0, 0)]


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

    def place(self, world: World, rank: int) -> Placed:
        rows, cols = self.shape
        part = rows // world.tensor
        name = self.names.of(world)
        rect = Rect(rank * part, (rank + 1) * part, 0, cols)
        return name, (2 * part, cols), [Piece(self.gate, rect, name, 0, 0), Piece(self.up, rect, name, part, 0)]


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

    def place(self, world: World, rank: int) -> Placed:
        name = self.names.of(world)
        spans = list(
            self._megatron(world.tensor, rank) if world.kind == "megatron" else self._sglang(world.tensor, rank)
        )
        pieces, row = [], 0
        for tensor, start, count in spans:
            pieces.append(Piece(tensor, Rect(start, start + count, 0, self.cols), name, row, 0))
            row += count
        return name, ((row,) if self.cols == 1 else (row, self.cols)), pieces

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
class Declaration:
    """A model's weights: the ops outside the layers, the ops of one layer, and the prefixes of the layers.

    The canonical prefix of layer 3 is "model.layers.3.", Megatron's "decoder.layers.3.", SGLang's "model.layers.3.".
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    embedding: VocabSplit
    layer: tuple[Op, ...]
    final_norm: Whole
    head: Op | None
    """The output layer; None where it is tied to the embedding."""
    layer_prefix: str = "model.layers.{}."
    megatron_layer_prefix: str = "decoder.layers.{}."

    def tensors(self) -> dict[str, Shape]:
        """Every canonical tensor and its shape, in the order of the model."""
        shapes: dict[str, Shape] = dict(self.embedding.tensors())
        for index in range(self.num_layers):
            for op in self.layer:
                shapes.update({self.layer_prefix.format(index) + name: shape for name, shape in op.tensors().items()})
        shapes.update(self.final_norm.tensors())
        if self.head is not None:
            shapes.update(self.head.tensors())
        return shapes
