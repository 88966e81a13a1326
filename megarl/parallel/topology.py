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


def stage_sizes(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """The layers of each pipeline stage, all its chunks together. 126 layers over pipeline 16 with first_stage_layers 7
    and last_stage_layers 7: 7, fourteen times 8, 7.

    Raises ValueError when the layers do not split so, or a stage not into its virtual stages; it names sizes that
    fit."""
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if pipeline == 1 and (first or last):
        raise ValueError(
            f"first_stage_layers is {first} and last_stage_layers {last}, but pipeline is 1; set both to 0"
        )
    left, num_even = num_layers - first - last, pipeline - bool(first) - bool(last)
    sizes = [left // num_even if num_even else 0] * pipeline
    sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
    if sum(sizes) == num_layers and all(size > 0 and size % virtual == 0 for size in sizes):
        return sizes
    what = (
        f"{num_layers} layers do not divide by pipeline {pipeline} x virtual_pipeline {virtual} = {pipeline * virtual}"
    )
    if first or last:
        what = (
            f"first_stage_layers {first} and last_stage_layers {last} leave {left} of {num_layers} layers for "
            f"{num_even} even stages" + (f", each in {virtual} equal chunks" if virtual > 1 else "")
        )
    raise ValueError(f"{what}; {_split_that_fits(num_layers, pipeline, virtual)}")


def _split_that_fits(num_layers: int, pipeline: int, virtual: int) -> str:
    """What to set: the largest stage as small as can be, then the outer stages, which have the vocabulary too."""
    num_chunks, rest = divmod(num_layers, virtual)
    if rest:
        return f"set virtual_pipeline to a divisor of {num_layers}"
    if num_chunks < pipeline:
        return f"set pipeline to {num_chunks} or less" + (" or virtual_pipeline to 1" if virtual > 1 else "")
    if num_chunks % pipeline == 0:
        return "set first_stage_layers and last_stage_layers to 0"
    splits = []
    for inner in range(1, num_chunks):
        outer = num_chunks - inner * (pipeline - 2)  # of the first and the last stage together
        if outer >= 2:
            splits.append((max(inner, -(-outer // 2)), outer))
    _, outer = min(splits)
    return f"set first_stage_layers {-(-outer // 2) * virtual} and last_stage_layers {outer // 2 * virtual}"


def stage_layers(num_layers: int, parallel: ParallelConfig, stage: int, virtual_stage: int) -> range:
    """The global numbers of the layers of one model chunk. Chunks go round the stages: with 8 layers, 2 stages and 2
    virtual stages, stage 0 has layers 0-1 and 4-5, stage 1 has 2-3 and 6-7.

    Raises ValueError when the layers do not split over the stages (see `stage_sizes`), or a stage is out of range."""
    pipeline, virtual = parallel.pipeline, parallel.virtual_pipeline
    if not 0 <= stage < pipeline or not 0 <= virtual_stage < virtual:
        raise ValueError(f"stage {stage} of {pipeline}, virtual stage {virtual_stage} of {virtual}: out of range")
    sizes = [size // virtual for size in stage_sizes(num_layers, parallel)]
    start = virtual_stage * sum(sizes) + sum(sizes[:stage])
    return range(start, start + sizes[stage])


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Rows of the whole embedding as Megatron holds it: so many that each of `tensor` ranks has a multiple of
    `multiple`. padded_vocab_size(151936, 4) == 152064"""
    unit = multiple * tensor
    return -(-vocab_size // unit) * unit
