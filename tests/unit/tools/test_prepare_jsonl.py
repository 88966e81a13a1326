"""tools/prepare_jsonl.py: any JSON lines, with fields named by flags."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megarl.data.prompts import load_rows

PATH = Path(__file__).parents[3] / "tools" / "prepare_jsonl.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("prepare_jsonl", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def convert(tool, tmp_path):
    def run(lines, *flags):
        source = tmp_path / "in.jsonl"
        source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        target = tmp_path / "out.parquet"
        fields = ["--prompt-field", "problem", "--answer-field", "solution.final", "--data-source", "me/p"]
        code = tool.main(["--input", str(source), "--output", str(target), *fields, *flags])
        return load_rows([target]) if code == 0 else None

    return run


LINE = {"problem": "What is 2+3?", "solution": {"final": 5}, "level": "easy"}


def test_fields_become_a_row(convert):
    (row,) = convert([LINE], "--instruction", "A number only.", "--keep", "level", "--ability", "math")
    assert row.prompt == [{"content": "What is 2+3? A number only.", "role": "user"}]
    assert (row.ground_truth, row.data_source, row.ability, row.style) == ("5", "me/p", "math", "rule")
    assert row.extra_info == {"level": "easy", "index": 0, "split": "train"}


def test_a_system_message_comes_first(convert):
    (row,) = convert([LINE], "--system", "Be brief.")
    assert [message["role"] for message in row.prompt] == ["system", "user"]


def test_chat_messages_are_kept_and_the_instruction_goes_to_the_last(convert):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (row,) = convert([{**LINE, "problem": messages}], "--instruction", "d")
    assert [(message["role"], message["content"]) for message in row.prompt] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c d"),
    ]


def test_plain_keeps_text(convert):
    (row,) = convert([LINE], "--plain")
    assert row.prompt == "What is 2+3?"


def test_the_answer_may_follow_a_mark(convert):
    (row,) = convert([{**LINE, "solution.final": "2+3 #### 4 #### 5 "}], "--answer-after", "####")
    assert row.ground_truth == "5"


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ("{oops", [], "line 2: is not valid JSON"),
        ({"question": "x"}, [], "line 2: has no field 'problem'; there is question"),
        ({**LINE, "solution": {"value": 5}}, [], "line 2: has no field 'final'; there is value"),
        ({**LINE, "problem": 3}, [], "line 2: problem is '3'; it must be text or a list of messages"),
        ({**LINE, "solution": {"final": None}}, [], "line 2: solution.final is 'None'"),
        (LINE, ["--keep", "topic"], "line 1: has no field 'topic'"),
        (LINE, ["--answer-after", "####"], "line 1: solution.final has no '####' in it"),
        (LINE, ["--plain", "--system", "x"], "--system has no place"),
    ],
)
def test_a_bad_line_is_named(convert, capsys, line, flags, message):
    assert convert([LINE, line], *flags) is None
    assert message in capsys.readouterr().err


def test_files_and_names_are_checked(tool, tmp_path, capsys):
    fields = ["--prompt-field", "a", "--answer-field", "b", "--data-source", "c"]
    assert tool.main(["--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "y.parquet"), *fields]) == 1
    assert "no file" in capsys.readouterr().err
    assert tool.main(["--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "y.json"), *fields]) == 1
    assert "must end in .parquet" in capsys.readouterr().err
