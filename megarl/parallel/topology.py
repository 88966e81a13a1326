"""Which rank is where: pure arithmetic, no torch. The grid is Megatron's default, order tp-cp-ep-dp-pp.

With tensor t, context c and data d, rank = tensor + t x (context + c x (data + d x pipeline)). The experts' grid lies
over the same ranks: rank = expert_tensor + et x (expert + e x (expert_data + ed x pipeline)).
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import ParallelConfig

VOCAB_MULTIPLE = 128
"""Columns of the vocabulary on a tensor-parallel rank are a multiple of this: what the GPU's matrix products like
best."""


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands, in the dense layers' grid and in the experts'."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one role. RankGrid(8, ParallelConfig(tensor=2, pipeline=2)).data_parallel_size == 2

    Raises ValueError when the sizes do not divide the number of ranks."""

    num_ranks: int
    parallel: ParallelConfig

    def __post_init__(self) -> None:
        sizes = self.parallel
        if self.num_ranks < 1 or self.num_ranks % sizes.model_size:
            raise ValueError(
                f"tensor {sizes.tensor} x context {sizes.context} x pipeline {sizes.pipeline} = {sizes.model_size} "
                f"does not divide {self.num_ranks} ranks"
            )
        expert_size = sizes.expert_tensor * sizes.expert * sizes.pipeline
        if self.num_ranks % expert_size:
            raise ValueError(
                f"expert_tensor {sizes.expert_tensor} x expert {sizes.expert} x pipeline {sizes.pipeline} = "
                f"{expert_size} does not divide {self.num_ranks} ranks"
            )

    @property
    def data_parallel_size(self) -> int:
        return self.num_ranks // self.parallel.model_size

    @property
    def expert_data_parallel_size(self) -> int:
        return self.num_ranks // (self.parallel.expert_tensor * self.parallel.expert * self.parallel.pipeline)

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError when there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; with {self.num_ranks} ranks it must be 0 to {self.num_ranks - 1}")
        sizes = self.parallel
        rest, tensor = divmod(rank, sizes.tensor)
        rest, context = divmod(rest, sizes.context)
        pipeline, data = divmod(rest, self.data_parallel_size)
        rest, expert_tensor = divmod(rank, sizes.expert_tensor)
        rest, expert = divmod(rest, sizes.expert)
        return Coordinates(
            tensor=tensor,
            context=context,
            data=data,
            pipeline=pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
            expert_data=rest % self.expert_data_parallel_size,
        )

    def rank_of(self, *, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """The rank at these coordinates of the dense grid. Raises ValueError when one is out of range."""
        sizes = self.parallel
        rank = 0
        for name, index, size in (
            ("pipeline", pipeline, sizes.pipeline),
            ("data", data, self.data_parallel_size),
            ("context", context, sizes.context),
            ("tensor", tensor, sizes.tensor),
        ):
            if not 0 <= index < size:
                raise ValueError(f"{name} is {index}; its size is {size}")
            rank = rank * size + index
        return rank

    def ranks_of_data(self, data: int) -> list[int]:
        """All ranks that hold one copy of the model and see the same batches, ascending."""
        sizes = self.parallel
        return [
            self.rank_of(tensor=tensor, context=context, data=data, pipeline=pipeline)
            for pipeline in range(sizes.pipeline)
            for context in range(sizes.context)
            for tensor in range(sizes.tensor)
        ]

    def output_rank(self, data: int) -> int:
        """The rank that has the model's outputs for these batches first: the last pipeline stage, tensor and context
        0."""
        return self.rank_of(data=data, pipeline=self.parallel.pipeline - 1)

    def is_first_replica(self, rank: int) -> bool:
        """Whether the rank holds the first of the equal copies of its (dense) weights."""
        here = self.coordinates(rank)
        return here.data == 0 and here.context == 0


def stage_layers(num_layers: int, pipeline: int, virtual: int, stage: int, virtual_stage: int) -> range:
    """The global numbers of the layers of one model chunk. Chunks go round the stages: with 8 layers, 2 stages and 2
    virtual stages, stage 0 has layers 0-1 and 4-5, stage 1 has 2-3 and 6-7.

    Raises ValueError when the layers do not divide by pipeline x virtual, or a stage is out of range."""
    if num_layers % (pipeline * virtual):
        raise ValueError(
            f"{num_layers} layers do not divide by pipeline {pipeline} x virtual_pipeline {virtual} = "
            f"{pipeline * virtual}; change one of them"
        )
    if not 0 <= stage < pipeline or not 0 <= virtual_stage < virtual:
        raise ValueError(f"stage {stage} of {pipeline}, virtual stage {virtual_stage} of {virtual}: out of range")
    size = num_layers // (pipeline * virtual)
    start = (virtual_stage * pipeline + stage) * size
    return range(start, start + size)


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Rows of the whole embedding as Megatron holds it: so many that each of `tensor` ranks has a multiple of
    `multiple`. padded_vocab_size(151936, 4) == 152064"""
    unit = multiple * tensor
    return -(-vocab_size // unit) * unit
