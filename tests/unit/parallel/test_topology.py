# ruff: noqa: E402
import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megarl.compat.megatron_cpu import install
from megarl.config import ActorConfig, ClusterConfig, Config, ParallelConfig, validate
from megarl.parallel.topology import Coordinates, RankGrid, padded_vocab_size, stage_layers, stage_sizes

install()

from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.model.hf_config import stage_fields

GRIDS = [
    (1, ParallelConfig()),
    (8, ParallelConfig(tensor=2, pipeline=2)),
    (16, ParallelConfig(tensor=2, context=2, pipeline=2)),
    (24, ParallelConfig(tensor=2, context=3, pipeline=2)),
    (32, ParallelConfig(tensor=4, pipeline=2, expert=2, expert_tensor=2)),
    (64, ParallelConfig(tensor=2, context=2, pipeline=4, expert=4, expert_tensor=1)),
]


def megatron_groups(num_ranks: int, sizes: ParallelConfig, kind: str, expert: bool = False) -> list[list[int]]:
    """Megatron's groups of ranks that differ in `kind` ("tp", "cp", "dp", "pp", "ep", or several joined by -) only."""
    grid = RankGrid(num_ranks, sizes)
    if expert:
        generator = RankGenerator(
            tp=sizes.expert_tensor,
            ep=sizes.expert,
            dp=grid.expert_data_parallel_size,
            pp=sizes.pipeline,
            cp=1,
            order="tp-cp-ep-dp-pp",
        )
    else:
        generator = RankGenerator(
            tp=sizes.tensor,
            ep=1,
            dp=grid.data_parallel_size,
            pp=sizes.pipeline,
            cp=sizes.context,
            order="tp-cp-ep-dp-pp",
        )
    return [sorted(group) for group in generator.get_ranks(kind)]


@pytest.mark.parametrize(("num_ranks", "sizes"), GRIDS)
def test_coordinates_are_positions_in_megatrons_groups(num_ranks: int, sizes: ParallelConfig) -> None:
    grid = RankGrid(num_ranks, sizes)
    kinds = [("tensor", "tp", False), ("context", "cp", False), ("data", "dp", False), ("pipeline", "pp", False)]
    kinds += [("expert", "ep", True), ("expert_tensor", "tp", True), ("expert_data", "dp", True)]
    for name, kind, expert in kinds:
        for group in megatron_groups(num_ranks, sizes, kind, expert):
            assert [getattr(grid.coordinates(rank), name) for rank in group] == list(range(len(group))), name


@pytest.mark.parametrize(("num_ranks", "sizes"), GRIDS)
def test_ranks_of_data_are_megatrons_model_parallel_groups(num_ranks: int, sizes: ParallelConfig) -> None:
    grid = RankGrid(num_ranks, sizes)
    own = [grid.ranks_of_data(data) for data in range(grid.data_parallel_size)]
    assert sorted(own) == sorted(megatron_groups(num_ranks, sizes, "tp-cp-pp"))


@pytest.mark.parametrize(("num_ranks", "sizes"), GRIDS)
def test_rank_of_undoes_coordinates(num_ranks: int, sizes: ParallelConfig) -> None:
    grid = RankGrid(num_ranks, sizes)
    for rank in range(num_ranks):
        at = grid.coordinates(rank)
        assert grid.rank_of(tensor=at.tensor, context=at.context, data=at.data, pipeline=at.pipeline) == rank


def test_worked_example() -> None:
    grid = RankGrid(8, ParallelConfig(tensor=2, pipeline=2))
    assert grid.coordinates(7) == Coordinates(
        tensor=1, context=0, data=1, pipeline=1, expert=0, expert_tensor=0, expert_data=3
    )
    assert grid.ranks_of_data(1) == [2, 3, 6, 7]
    assert grid.output_rank(1) == 6
    assert [rank for rank in range(8) if grid.is_first_replica(rank)] == [0, 1, 4, 5]


def test_errors_name_the_numbers() -> None:
    with pytest.raises(ValueError, match="tensor 2 x context 1 x pipeline 2 = 4 does not divide 6 ranks"):
        RankGrid(6, ParallelConfig(tensor=2, pipeline=2))
    with pytest.raises(ValueError, match="expert 4 x pipeline 1 = 4 does not divide 6 ranks"):
        RankGrid(6, ParallelConfig(expert=4))
    grid = RankGrid(4, ParallelConfig(tensor=2))
    with pytest.raises(ValueError, match="rank is 4; with 4 ranks"):
        grid.coordinates(4)
    with pytest.raises(ValueError, match="data is 2; its size is 2"):
        grid.rank_of(data=2)


def layers_of(num_layers: int, sizes: ParallelConfig) -> list[list[list[int]]]:
    """Of each stage, of each of its chunks."""
    chunks = range(sizes.virtual_pipeline)
    return [[list(stage_layers(num_layers, sizes, stage, v)) for v in chunks] for stage in range(sizes.pipeline)]


def test_layers_of_a_stage() -> None:
    assert stage_layers(8, ParallelConfig(pipeline=2), 1, 0) == range(4, 8)
    interleaved = ParallelConfig(pipeline=2, virtual_pipeline=2)
    assert layers_of(8, interleaved) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(ValueError, match="6 layers do not divide by pipeline 2 x virtual_pipeline 2 = 4"):
        stage_layers(6, interleaved, 0, 0)
    with pytest.raises(ValueError, match="stage 2 of 2"):
        stage_layers(8, ParallelConfig(pipeline=2), 2, 0)


def test_layers_of_uneven_stages_by_hand() -> None:
    first = ParallelConfig(pipeline=2, first_stage_layers=1)
    assert layers_of(3, first) == [[[0]], [[1, 2]]]
    both = ParallelConfig(pipeline=4, first_stage_layers=1, last_stage_layers=2)
    assert layers_of(7, both) == [[[0]], [[1, 2]], [[3, 4]], [[5, 6]]]
    last = ParallelConfig(pipeline=3, virtual_pipeline=2, last_stage_layers=2)
    assert layers_of(10, last) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]
    alone = ParallelConfig(pipeline=2, first_stage_layers=2, last_stage_layers=3)
    assert layers_of(5, alone) == [[[0, 1]], [[2, 3, 4]]]


def test_sizes_of_stages_of_large_models() -> None:
    sizes = ParallelConfig(pipeline=16, first_stage_layers=7, last_stage_layers=7)
    assert stage_sizes(126, sizes) == [7] + [8] * 14 + [7]
    sizes = ParallelConfig(pipeline=8, first_stage_layers=11, last_stage_layers=11)
    assert stage_sizes(94, sizes) == [11] + [12] * 6 + [11]


def sizes_that_split(num_layers: int) -> Iterator[ParallelConfig]:
    """Pipelines and virtual pipelines; the outer stages even or as many as there may be in Megatron."""
    for pipeline, virtual in itertools.product(range(2, 6), (1, 2, 3)):
        for first, last in itertools.product(range(0, num_layers, virtual), repeat=2):
            sizes = ParallelConfig(
                pipeline=pipeline, virtual_pipeline=virtual, first_stage_layers=first, last_stage_layers=last
            )
            with contextlib.suppress(ValueError):
                stage_sizes(num_layers, sizes)
                yield sizes


@pytest.mark.parametrize("num_layers", [6, 9, 12])
def test_stages_are_megatrons(num_layers: int) -> None:
    """Its block builds so many layers, numbered from that offset."""
    found = list(sizes_that_split(num_layers))
    assert any(sizes.first_stage_layers and sizes.last_stage_layers and sizes.virtual_pipeline > 1 for sizes in found)
    for sizes in found:
        made = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
            pipeline_dtype=torch.float32,
            **stage_fields(sizes),
        )
        for stage, chunks in enumerate(layers_of(num_layers, sizes)):
            for virtual, layers in enumerate(chunks):
                at = {"vp_stage": virtual if sizes.virtual_pipeline > 1 else None, "pp_rank": stage}
                start, count = get_transformer_layer_offset(made, **at), get_num_layers_to_build(made, **at)
                assert layers == list(range(start, start + count)), (sizes, stage, virtual)


def test_each_layer_is_on_one_stage() -> None:
    sizes = ParallelConfig(pipeline=4, virtual_pipeline=3)
    assert sorted(layer for stage in layers_of(24, sizes) for chunk in stage for layer in chunk) == list(range(24))


@pytest.mark.parametrize(
    ("num_layers", "sizes", "message"),
    [
        (126, {"pipeline": 16}, "126 layers .* pipeline 16 .*; set first_stage_layers 7 and last_stage_layers 7"),
        (94, {"pipeline": 8}, "set first_stage_layers 11 and last_stage_layers 11"),
        (3, {"pipeline": 2}, "set first_stage_layers 2 and last_stage_layers 1"),
        (6, {"pipeline": 2, "virtual_pipeline": 2}, "set first_stage_layers 4 and last_stage_layers 2"),
        (
            126,
            {"pipeline": 16, "first_stage_layers": 7},
            "first_stage_layers 7 and last_stage_layers 0 leave 119 of 126 layers for 15 even stages; set .* 7",
        ),
        (
            8,
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3},
            "leave 5 of 8 layers for 1 even stages, each in 2 equal chunks; set .* and .* to 0",
        ),
        (8, {"pipeline": 2, "first_stage_layers": 8}, "leave 0 of 8 layers for 1 even stages"),
        (8, {"pipeline": 3, "first_stage_layers": 10}, "leave -2 of 8 layers for 2 even stages"),
        (8, {"first_stage_layers": 8}, "first_stage_layers is 8 and last_stage_layers 0, but pipeline is 1; set both"),
        (3, {"pipeline": 4}, "set pipeline to 3 or less"),
        (6, {"pipeline": 4, "virtual_pipeline": 2}, "set pipeline to 3 or less or virtual_pipeline to 1"),
        (7, {"pipeline": 2, "virtual_pipeline": 2}, "set virtual_pipeline to a divisor of 7"),
    ],
)
def test_layers_that_do_not_split_name_a_split_that_fits(num_layers: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_sizes(num_layers, ParallelConfig(**sizes))


@pytest.mark.parametrize(("pipeline", "virtual"), itertools.product((2, 3, 5, 8), (1, 2)))
def test_the_split_that_an_error_names_has_the_smallest_largest_stage(pipeline: int, virtual: int) -> None:
    sizes = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    for num_layers in range(pipeline * virtual + virtual, 30, virtual):
        if num_layers % (pipeline * virtual) == 0:
            continue
        with pytest.raises(ValueError, match="set first_stage_layers") as caught:
            stage_sizes(num_layers, sizes)
        first, last = map(int, re.findall(r"\d+", str(caught.value).split("; ")[1]))
        named = stage_sizes(num_layers, replace(sizes, first_stage_layers=first, last_stage_layers=last))
        largest = []
        for outer in itertools.product(range(1, num_layers), repeat=2):
            with contextlib.suppress(ValueError):
                split = replace(sizes, first_stage_layers=outer[0], last_stage_layers=outer[1])
                largest.append(max(stage_sizes(num_layers, split)))
        assert max(named) == min(largest)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"first_stage_layers": -1}, "actor.parallel.first_stage_layers: is -1, must be at least 0"),
        (
            {"last_stage_layers": 3},
            "actor.parallel.last_stage_layers: is 3, but pipeline is 1; set it to 0 or pipeline to 2 or more",
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 2},
            "actor.parallel.first_stage_layers: 3 is no multiple of virtual_pipeline 2, so the stage does not split "
            "into virtual stages; set it to one",
        ),
        ({"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 4, "last_stage_layers": 2}, None),
    ],
)
def test_a_configuration_of_outer_stages_that_cannot_be(sizes: dict[str, int], said: str | None) -> None:
    made = Config(cluster=ClusterConfig(gpus_per_node=2), actor=ActorConfig(parallel=ParallelConfig(**sizes)))
    found = [violation for violation in validate(made) if violation.startswith("actor.parallel")]
    assert found == ([] if said is None else [said])


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(151936, 1) == 151936 + 0  # 1187 x 128
    assert padded_vocab_size(151936, 4) == 152064
    assert padded_vocab_size(90, 2) == 256
    assert padded_vocab_size(90, 2, multiple=1) == 90
