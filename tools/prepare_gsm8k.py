#!/usr/bin/env python
"""Turn the original GSM8K files into the parquet files that megarl (and verl) trains on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from megarl.data.prompts import Row, write_rows
from megarl.rewards.gsm8k import extract_number

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

DESCRIPTION = f"""\
Turn the original GSM8K files into the parquet files that megarl (and verl) trains on.

The input has one object a line: {{"question": "...", "answer": "... #### 72"}}. It is train.jsonl and test.jsonl of
https://github.com/openai/grade-school-math (folder grade_school_math/data), MIT licence.

Each prompt is the question followed by: {INSTRUCTION}
The ground truth is what follows the last "####", without commas and dollar signs.

example:
  python tools/prepare_gsm8k.py --train train.jsonl --test test.jsonl --output data/gsm8k
  then: data.train=[data/gsm8k/train.parquet] data.validation=[data/gsm8k/test.parquet] reward.function=gsm8k
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="train.jsonl (7,473 problems)")
    parser.add_argument("--test", type=Path, help="test.jsonl (1,319 problems)")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.parquet and test.parquet")
    options = parser.parse_args(arguments)
    inputs = {"train": options.train, "test": options.test}
    if not any(inputs.values()):
        parser.error("give --train, --test or both")
    console = Console(stderr=True)
    try:
        for split, path in inputs.items():
            if path is not None:
                rows = read_problems(path, split, console)
                written = write_rows(options.output / f"{split}.parquet", rows)
                console.print(f"{written}: {len(rows):,} rows", highlight=False)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_problems(path: Path, split: str, console: Console | None = None) -> list[Row]:
    """The rows of one GSM8K file. Raises ValueError naming file and line where a line is not in GSM8K's form."""
    if not path.is_file():
        raise ValueError(f"no file {path}")
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(track(lines, f"reading {path.name}", console=console, transient=True), start=1):
        if line.strip():
            rows.append(_to_row(line, f"{path}, line {number}", split, len(rows)))
    return rows


def _to_row(line: str, where: str, split: str, index: int) -> Row:
    try:
        problem = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(problem, dict) or not all(isinstance(problem.get(key), str) for key in ("question", "answer")):
        keys = ", ".join(problem) if isinstance(problem, dict) else type(problem).__name__
        raise ValueError(f"{where}: must have the strings question and answer; there is {keys or 'nothing'}")
    question, answer = problem["question"], problem["answer"]
    if extract_number(answer) is None:
        raise ValueError(f'{where}: the answer has no number after "####"')
    return Row(
        data_source=DATA_SOURCE,
        prompt=[{"content": f"{question} {INSTRUCTION}", "role": "user"}],
        ground_truth=answer.rsplit("####", 1)[1].replace(",", "").replace("$", "").strip(),
        ability="math",
        extra_info={"answer": answer, "index": index, "question": question, "split": split},
    )


if __name__ == "__main__":
    sys.exit(main())
