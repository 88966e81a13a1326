# ruff: noqa: E402
import pytest

from megarl.compat.megatron_cpu import install
from megarl.config import ParallelConfig
from megarl.parallel.topology import Coordinates, RankGrid, padded_vocab_size, stage_layers

install()

from megatron.core.parallel_state import RankGenerator

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


def test_layers_of_a_stage() -> None:
    assert stage_layers(8, 2, 1, 1, 0) == range(4, 8)
    assert [list(stage_layers(8, 2, 2, stage, 1)) for stage in (0, 1)] == [[4, 5], [6, 7]]
    with pytest.raises(ValueError, match="6 layers do not divide by pipeline 2 x virtual_pipeline 2 = 4"):
        stage_layers(6, 2, 2, 0, 0)
    with pytest.raises(ValueError, match="stage 2 of 2"):
        stage_layers(8, 2, 1, 2, 0)


def test_each_layer_is_on_one_stage() -> None:
    held = [layer for stage in range(4) for virtual in range(3) for layer in stage_layers(24, 4, 3, stage, virtual)]
    assert sorted(held) == list(range(24))


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(151936, 1) == 151936 + 0  # 1187 x 128
    assert padded_vocab_size(151936, 4) == 152064
    assert padded_vocab_size(90, 2) == 256
    assert padded_vocab_size(90, 2, multiple=1) == 90
