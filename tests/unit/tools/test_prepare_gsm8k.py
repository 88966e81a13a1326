"""tools/prepare_gsm8k.py: from the original files to rows with the familiar instruction."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.data.prompts import load_rows

PATH = Path(__file__).parents[3] / "tools" / "prepare_gsm8k.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(question="How many?", answer="6 * 200 = <<6*200=1200>>1200\n#### $1,200"):
    return json.dumps({"question": question, "answer": answer}, ensure_ascii=False)


def test_rows_have_question_instruction_and_answer(tool, tmp_path):
    source = tmp_path / "train.jsonl"
    source.write_text(problem() + "\n\n" + problem("Odd\u2028line?", "#### -3") + "\n", encoding="utf-8")
    assert tool.main(["--train", str(source), "--output", str(tmp_path / "out")]) == 0
    first, second = load_rows([tmp_path / "out" / "train.parquet"])
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert first.prompt == [{"content": f"How many? {instruction}", "role": "user"}]
    assert (first.ground_truth, first.data_source, first.ability, first.style) == (
        "1200",
        "openai/gsm8k",
        "math",
        "rule",
    )
    assert first.extra_info == {
        "answer": "6 * 200 = <<6*200=1200>>1200\n#### $1,200",
        "index": 0,
        "question": "How many?",
        "split": "train",
    }
    assert (second.ground_truth, second.extra_info["index"]) == ("-3", 1)


def test_the_columns_are_those_of_the_published_files(tool, tmp_path):
    source = tmp_path / "test.jsonl"
    source.write_text(problem())
    tool.main(["--test", str(source), "--output", str(tmp_path)])
    assert str(pq.read_schema(tmp_path / "test.parquet").remove_metadata()) == (
        "data_source: string\n"
        "prompt: list<element: struct<content: string, role: string>>\n"
        "  child 0, element: struct<content: string, role: string>\n"
        "      child 0, content: string\n"
        "      child 1, role: string\n"
        "ability: string\n"
        "reward_model: struct<ground_truth: string, style: string>\n"
        "  child 0, ground_truth: string\n"
        "  child 1, style: string\n"
        "extra_info: struct<answer: string, index: int64, question: string, split: string>\n"
        "  child 0, answer: string\n"
        "  child 1, index: int64\n"
        "  child 2, question: string\n"
        "  child 3, split: string"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: is not valid JSON"),
        (
            '{"question": "x", "solution": "y"}',
            "line 2: must have the strings question and answer; there is question, solution",
        ),
        (problem(answer="no mark"), 'line 2: the answer has no number after "####"'),
    ],
)
def test_a_bad_line_is_named(tool, tmp_path, capsys, line, message):
    source = tmp_path / "train.jsonl"
    source.write_text(problem() + "\n" + line)
    assert tool.main(["--train", str(source), "--output", str(tmp_path)]) == 1
    assert f"train.jsonl, {message}" in capsys.readouterr().err
    assert not (tmp_path / "train.parquet").exists()


def test_no_input_and_a_missing_file_are_errors(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--output", str(tmp_path)])
    assert "give --train, --test or both" in capsys.readouterr().err
    assert tool.main(["--train", str(tmp_path / "none.jsonl"), "--output", str(tmp_path)]) == 1
    assert "no file" in capsys.readouterr().err


def test_help_shows_what_to_type(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    text = capsys.readouterr().out
    assert "python tools/prepare_gsm8k.py --train" in text
    assert "data.train=[data/gsm8k/train.parquet]" in text
