"""Small arithmetic tasks with a verifiable answer, made on the spot: what the quickstart trains on.

A row: prompt [{"role": "user", "content": "3+5="}], ground truth "8", data source "megarl/arithmetic".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.data.prompts import Row, write_rows
from megarl.types import IntArray

DATA_SOURCE = "megarl/arithmetic"


@dataclass(frozen=True)
class Task:
    """answer = compute(a, b), modulo `modulus` where there is one; the prompt is "<a><sign><b>="."""

    sign: str
    compute: Callable[[int, int], int]
    modulus: int | None = None


TASKS = {
    "addition": Task("+", lambda a, b: a + b),
    "addition_mod10": Task("+", lambda a, b: a + b, modulus=10),
    "subtraction": Task("-", lambda a, b: a - b),
    "multiplication": Task("*", lambda a, b: a * b),
}


def write_arithmetic(
    folder: str | os.PathLike[str],
    task: str = "addition",
    *,
    max_operand: int = 9,
    modulus: int | None = None,
    num_train: int = 1000,
    num_validation: int = 20,
    seed: int = 0,
    held_out: bool = True,
) -> tuple[Path, Path]:
    """Write <folder>/train.parquet and <folder>/validation.parquet; gives their paths.

    The same arguments write the same rows. Operands are 0 to `max_operand`. modulus: the answer is taken modulo it
    (instead of the task's own). Validation pairs are distinct. With `held_out` they never occur in training, in this
    order of operands: where 3+5 is held out, 5+3 may be trained on. Training pairs are distinct until all have been
    used; then they repeat, each as often as any other, give or take one.

    Raises ValueError for an unknown task, and when there are too few pairs of operands.
    """
    if task not in TASKS:
        raise ValueError(f"unknown arithmetic task {task!r}; there are {', '.join(TASKS)}")
    if max_operand < 0 or num_train < 1 or num_validation < 1 or (modulus is not None and modulus < 1):
        raise ValueError(
            f"max_operand is {max_operand} (0 or more), num_train {num_train}, num_validation {num_validation} and "
            f"modulus {modulus} (each 1 or more; modulus may be empty)"
        )
    num_pairs = (max_operand + 1) ** 2
    needed = num_validation + 1 if held_out else num_validation
    if needed > num_pairs:
        raise ValueError(
            f"operands 0 to {max_operand} give {num_pairs} pairs, but num_validation = "
            f"{num_validation}{' held out and at least 1 to train on' if held_out else ''} need {needed}; lower "
            f"num_validation or raise max_operand"
        )

    generator = np.random.default_rng(seed)
    drawn = generator.choice(num_pairs, size=min(num_pairs, num_validation + num_train), replace=False)
    validation = drawn[:num_validation]
    pool = drawn[num_validation:] if held_out else generator.choice(num_pairs, min(num_pairs, num_train), replace=False)
    rounds = [generator.permutation(pool) for _ in range(-(-num_train // len(pool)))]
    train = np.concatenate(rounds)[:num_train]

    def rows(pairs: IntArray, split: str) -> list[Row]:
        return [
            _row(task, *divmod(int(pair), max_operand + 1), modulus, index, split) for index, pair in enumerate(pairs)
        ]

    return (
        write_rows(Path(folder) / "train.parquet", rows(train, "train")),
        write_rows(Path(folder) / "validation.parquet", rows(validation, "validation")),
    )


def _row(task: str, a: int, b: int, modulus: int | None, index: int, split: str) -> Row:
    sign, compute = TASKS[task].sign, TASKS[task].compute
    modulus = modulus or TASKS[task].modulus
    answer = compute(a, b) % modulus if modulus else compute(a, b)
    return Row(
        data_source=DATA_SOURCE,
        prompt=[{"content": f"{a}{sign}{b}=", "role": "user"}],
        ground_truth=str(answer),
        ability="math",
        extra_info={"index": index, "split": split, "a": a, "b": b},
    )
