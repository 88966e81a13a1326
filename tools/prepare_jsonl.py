#!/usr/bin/env python
"""Turn any file with one JSON object a line into a parquet file that megarl trains on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from megarl.data.prompts import Row, write_rows

DESCRIPTION = """\
Turn any file with one JSON object a line into a parquet file that megarl trains on.

Say which field holds the prompt and which the right answer. A field inside an object is named with dots (meta.answer).
The prompt field may be text, which becomes a user message, or a list of chat messages, which is kept.

example: a file with lines like {"problem": "What is 2+3?", "solution": {"final": 5}, "level": "easy"}
  python tools/prepare_jsonl.py --input problems.jsonl --output data/problems/train.parquet \\
      --prompt-field problem --answer-field solution.final --data-source me/problems \\
      --instruction "Answer with a number only." --keep level
  then: data.train=[data/problems/train.parquet] reward.function=exact
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        if options.output.suffix != ".parquet":
            raise ValueError(f"--output {options.output} must end in .parquet")
        if options.plain and options.system:
            raise ValueError("--plain has no messages, so --system has no place; leave one out")
        rows = read_rows(options, console)
        write_rows(options.output, rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(f"{options.output}: {len(rows):,} rows", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", type=Path, required=True, nargs="+", help="one or more .jsonl files")
    add("--output", type=Path, required=True, help="the .parquet file to write")
    add("--prompt-field", required=True, help="field with the prompt: text, or chat messages")
    add("--answer-field", required=True, help="field with the right answer: text or a number")
    add("--answer-after", metavar="MARK", help='take only what follows the last MARK in the answer, such as "####"')
    add(
        "--data-source",
        required=True,
        help="name of the data set, for metrics (val-core/<name>/...) and for your reward",
    )
    add("--ability", default="", help="kind of task, such as math (default: empty)")
    add("--style", default="rule", help="reward_model.style (default: rule)")
    add("--instruction", default="", help="text to put after the prompt, with a space between")
    add("--system", default="", help="system message to put before the prompt")
    add("--plain", action="store_true", help="keep the prompt as plain text, to be used without chat template")
    add("--keep", nargs="*", default=[], metavar="FIELD", help="fields to keep in extra_info, for your reward function")
    add("--split", default="train", help="extra_info.split (default: train)")
    return parser


def read_rows(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """The rows of all inputs. Raises ValueError naming file and line where a line does not have what the options
    say."""
    rows: list[Row] = []
    for path in options.input:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(track(lines, f"reading {path.name}", console=console, transient=True), start=1):
            if line.strip():
                rows.append(_to_row(line, f"{path}, line {number}", options, len(rows)))
    return rows


def _to_row(line: str, where: str, options: argparse.Namespace, index: int) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not valid JSON ({error})") from error
    kept = {name: _field(value, name, where) for name in options.keep}
    return Row(
        data_source=options.data_source,
        prompt=_prompt(_field(value, options.prompt_field, where), where, options),
        ground_truth=_answer(_field(value, options.answer_field, where), where, options),
        ability=options.ability,
        style=options.style,
        extra_info={**kept, "index": index, "split": options.split},
    )


def _field(value: Any, name: str, where: str) -> Any:
    """The value of a field; "a.b" is field b of field a, unless there is a field called "a.b"."""
    if isinstance(value, dict) and name in value:
        return value[name]
    outer, dot, inner = name.partition(".")
    if dot and isinstance(value, dict) and outer in value:
        return _field(value[outer], inner, where)
    there = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
    raise ValueError(f"{where}: has no field {name!r}; there is {there or 'nothing'}")


def _prompt(prompt: Any, where: str, options: argparse.Namespace) -> str | list[dict[str, str]]:
    field = options.prompt_field
    if isinstance(prompt, str) and prompt.strip():
        text = f"{prompt} {options.instruction}" if options.instruction else prompt
        if options.plain:
            return text
        messages = [{"content": text, "role": "user"}]
    elif isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt) and not options.plain:
        messages = [{"content": message["content"], "role": message["role"]} for message in prompt]
        if options.instruction:
            messages[-1]["content"] += f" {options.instruction}"
    else:
        wanted = "text" if options.plain else "text or a list of messages {role, content}"
        raise ValueError(f"{where}: {field} is {str(prompt)[:60]!r}; it must be {wanted}")
    return [{"content": options.system, "role": "system"}, *messages] if options.system else messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _answer(answer: Any, where: str, options: argparse.Namespace) -> str:
    if answer is None or isinstance(answer, (dict, list)):
        raise ValueError(f"{where}: {options.answer_field} is {str(answer)[:60]!r}; it must be text or a number")
    text = str(answer)
    if options.answer_after:
        if options.answer_after not in text:
            raise ValueError(f"{where}: {options.answer_field} has no {options.answer_after!r} in it")
        text = text.rsplit(options.answer_after, 1)[1]
    return text.strip()


if __name__ == "__main__":
    sys.exit(main())
