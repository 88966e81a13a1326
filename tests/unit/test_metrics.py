"""Sums that add over ranks, and files that a resumed run goes on with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.metrics import MetricsWriter, Stats, balance_metrics, length_metrics, read_metrics

numbers = st.lists(st.integers(-1000, 1000).map(float))


@settings(deadline=None)
@given(numbers, numbers)
def test_stats_of_two_parts_add_up_to_those_of_the_whole(first: list[float], second: list[float]) -> None:
    assert Stats.of(first) + Stats.of(second) == Stats.of(first + second)


def test_stats_have_names_where_there_are_values() -> None:
    assert Stats.of([1.0, -2.0, 4.0]).named("x") == {"x/mean": 1.0, "x/max": 4.0, "x/min": -2.0}
    assert Stats().named("x") == {}


def test_the_share_of_answers_at_the_limit() -> None:
    found = length_metrics("response_length", [2, 8, 8, 6], limit=8)
    assert found == {
        "response_length/mean": 6.0,
        "response_length/max": 8.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
    }
    assert length_metrics("x", [], 8) == {"x/clip_ratio": 0.0}


def test_balance_by_hand() -> None:
    """In order of arrival two ranks would have 1 + 2 + 3 = 6 and 10 + 4 = 14 tokens."""
    assert balance_metrics([1, 2, 3, 10, 4], loads=[11, 9], num_ranks=2) == {
        "global_seqlen/min": 6.0,
        "global_seqlen/max": 14.0,
        "global_seqlen/minmax_diff": 8.0,
        "global_seqlen/mean": 10.0,
        "global_seqlen/balanced_min": 9.0,
        "global_seqlen/balanced_max": 11.0,
    }


def scalars(writer: MetricsWriter, name: str) -> dict[int, float]:
    events = EventAccumulator(writer.tensorboard_folder)
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def logged(writer: MetricsWriter, name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in read_metrics(writer.jsonl)]


def write(folder: Path, steps: dict[int, float], first_step: int = 0) -> MetricsWriter:
    writer = MetricsWriter(str(folder), first_step)
    for step, value in steps.items():
        writer.write(step, {"x": value})
    writer.close()
    return writer


def test_what_is_written_is_in_both_files(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path / "run"))
    writer.write(1, {"actor/lr": 0.5, "actor/grad_norm": math.inf})
    writer.write(2, {"actor/lr": 0.25, "actor/grad_norm": math.nan})
    writer.write_histogram(2, "lengths", [1, 2, 2])
    writer.write_histogram(2, "none", [])
    writer.write_texts(2, "samples", {"0": "2+2=4"})
    writer.close()
    entries = read_metrics(writer.jsonl)
    assert [(e["step"], e["actor/lr"], e["actor/grad_norm"]) for e in entries] == [(1, 0.5, None), (2, 0.25, None)]
    events = EventAccumulator(writer.tensorboard_folder, size_guidance={"tensors": 0, "histograms": 0})
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("actor/lr")} == {1: 0.5, 2: 0.25}
    assert math.isinf(events.Scalars("actor/grad_norm")[0].value)
    assert math.isnan(events.Scalars("actor/grad_norm")[1].value)
    assert events.Tags()["histograms"] == ["lengths"]
    assert events.Histograms("lengths")[0].histogram_value.num == 3
    assert events.Tensors("samples/0/text_summary")[0].tensor_proto.string_val == [b"2+2=4"]


def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path) -> None:
    write(tmp_path, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0})
    writer = write(tmp_path, {3: 30.0}, first_step=2)
    assert logged(writer, "x") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(writer, "x") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 30.0}


def test_a_new_run_in_the_folder_of_an_old_one_drops_all_of_it(tmp_path: Path) -> None:
    """Step 0 is the validation before training, which a new run does again."""
    write(tmp_path, {0: 0.0, 1: 1.0, 2: 2.0})
    writer = write(tmp_path, {0: 10.0, 1: 11.0})
    assert logged(writer, "x") == [(0, 10.0), (1, 11.0)]
    assert scalars(writer, "x") == {0: 10.0, 1: 11.0}


@pytest.mark.parametrize("torn", ['{"step": 3, "x": 3', '{"step": 3, "x": 3.0}'])
def test_a_line_that_a_killed_run_left_unfinished_does_not_stop_the_next(tmp_path: Path, torn: str) -> None:
    writer = write(tmp_path, {1: 1.0, 2: 2.0})
    with open(writer.jsonl, "a") as file:
        file.write(torn)
    assert logged(write(tmp_path, {3: 4.0}, first_step=2), "x") == [(1, 1.0), (2, 2.0), (3, 4.0)]
