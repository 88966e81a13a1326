"""The generated arithmetic tasks: right answers, held-out pairs, the same rows for the same seed."""

from __future__ import annotations

from collections import Counter

import pytest

from megarl.data.arithmetic import TASKS, write_arithmetic
from megarl.data.prompts import load_rows


def rows_of(folder, *arguments, **options):
    train, validation = write_arithmetic(folder, *arguments, **options)
    assert (train.name, validation.name) == ("train.parquet", "validation.parquet")
    return load_rows([train]), load_rows([validation])


def pair(row):
    return row.extra_info["a"], row.extra_info["b"]


def test_a_row_is_in_the_familiar_form(tmp_path):
    train, validation = rows_of(tmp_path, max_operand=0, num_train=1, num_validation=1, held_out=False)
    assert train[0].prompt == [{"content": "0+0=", "role": "user"}]
    assert (train[0].ground_truth, train[0].data_source, train[0].ability) == ("0", "megarl/arithmetic", "math")
    assert train[0].extra_info == {"index": 0, "split": "train", "a": 0, "b": 0}
    assert validation[0].extra_info["split"] == "validation"


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right(tmp_path, task):
    train, validation = rows_of(tmp_path, task, num_train=60, num_validation=20)
    assert (len(train), len(validation)) == (60, 20)
    for row in train + validation:
        expression = row.prompt[0]["content"].removesuffix("=")
        expected = eval(expression)
        assert row.ground_truth == str(expected % 10 if task == "addition_mod10" else expected)


def test_a_modulus_takes_the_place_of_the_tasks_own(tmp_path):
    train, _ = rows_of(tmp_path, "addition_mod10", modulus=7, num_train=50, num_validation=10)
    assert all(row.ground_truth == str(sum(pair(row)) % 7) for row in train)


def test_operands_cover_their_range_and_stay_in_it(tmp_path):
    train, _ = rows_of(tmp_path, max_operand=12, num_train=150, num_validation=10)
    assert {a for a, _ in map(pair, train)} == set(range(13))


def test_held_out_pairs_are_distinct_and_never_trained_on(tmp_path):
    train, validation = rows_of(tmp_path, num_train=500, num_validation=30)
    assert len(set(map(pair, validation))) == 30
    assert not set(map(pair, validation)) & set(map(pair, train))
    # The 70 others repeat evenly: 500 = 7 x 70 + 10.
    counts = Counter(map(pair, train))
    assert len(counts) == 70
    assert Counter(counts.values()) == {7: 60, 8: 10}


def test_without_holding_out_training_has_every_pair(tmp_path):
    train, validation = rows_of(tmp_path, num_train=100, num_validation=100, held_out=False)
    assert len(set(map(pair, train))) == len(set(map(pair, validation))) == 100
    assert list(map(pair, train)) != list(map(pair, validation))


def test_many_operands_are_drawn_without_listing_all_pairs(tmp_path):
    train, validation = rows_of(tmp_path, max_operand=99_999, num_train=100, num_validation=10)
    assert len(set(map(pair, train)) | set(map(pair, validation))) == 110
    assert max(max(pair(row)) for row in train) > 50_000


def test_the_same_seed_writes_the_same_rows(tmp_path):
    first, same, other = (rows_of(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "algebra"}, "unknown arithmetic task 'algebra'; there are addition, addition_mod10"),
        ({"num_validation": 100}, "100 pairs, but num_validation = 100 held out.* need 101"),
        ({"num_validation": 101, "held_out": False}, "100 pairs, but num_validation = 101 need 101"),
        ({"num_train": 0}, "num_train 0"),
        ({"modulus": 0}, "modulus 0"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_numbers(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write_arithmetic(tmp_path, **options)
