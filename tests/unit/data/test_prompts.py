"""Reading data files, tokenising, and the resumable walk over the prompts."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from megarl.data.prompts import PromptSet, PromptStream, Row, load_rows, write_rows
from megarl.types import Prompt


def a_row(content="3+5=", answer="8", **changes):
    row = {
        "data_source": "me/sums",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 4},
    }
    return {**row, **changes}


def without(row, key):
    return {name: value for name, value in row.items() if name != key}


def write(path, values):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(values), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture(params=["data.parquet", "data.json", "data.jsonl"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_rows_are_the_same_from_every_kind_of_file(path):
    assert load_rows([write(path, [a_row(), a_row("1+1=", "2")])]) == [
        Row("me/sums", [{"role": "user", "content": "3+5="}], "8", "math", "rule", {"index": 4}),
        Row("me/sums", [{"role": "user", "content": "1+1="}], "2", "math", "rule", {"index": 4}),
    ]


def test_files_are_read_one_after_another(tmp_path):
    first = write(tmp_path / "a.jsonl", [a_row("1"), a_row("2")])
    second = write(tmp_path / "b.parquet", [a_row("3")])
    assert [row.prompt[0]["content"] for row in load_rows([str(first), str(second)])] == ["1", "2", "3"]


def test_ability_style_and_extra_info_may_be_missing(path):
    value = without(without(a_row(reward_model={"ground_truth": "8"}), "ability"), "extra_info")
    (row,) = load_rows([write(path, [value])])
    assert (row.ability, row.style, row.extra_info) == ("", "rule", {})


def test_a_plain_string_is_a_prompt(path):
    (row,) = load_rows([write(path, [a_row(prompt="3+5=")])])
    assert row.prompt == "3+5="


@pytest.mark.parametrize(("value", "text"), [(8, "8"), (2.5, "2.5"), (["8", "9"], '["8", "9"]'), (True, "true")])
def test_a_ground_truth_that_is_no_string_becomes_one(path, value, text):
    (row,) = load_rows([write(path, [a_row(reward_model={"ground_truth": value})])])
    assert row.ground_truth == text


def test_other_columns_and_empty_lines_do_not_matter(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(a_row(notes="x")) + "\n\n" + json.dumps(a_row()) + "\n")
    assert len(load_rows([path])) == 2


def test_a_missing_column_is_named_with_those_that_are_there(path):
    write(path, [without(a_row(), "reward_model")])
    with pytest.raises(
        ValueError, match=r"has no column reward_model; there are data_source, prompt, ability, extra_info"
    ):
        load_rows([path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, r"prompt is \[\]"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": [{"role": "user"}]}, "message 0 of the prompt is"),
        ({"prompt": ["3+5="]}, "message 0 of the prompt is '3\\+5='"),
        ({"reward_model": {"style": "rule"}}, r"reward_model is \{'style': 'rule'\}; it must be an object with a gr"),
        ({"reward_model": "8"}, "reward_model is '8'"),
        ({"data_source": 3}, "data_source is 3; it must be a string"),
        ({"extra_info": "x"}, "extra_info is 'x'"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, changes, message):
    path = write(tmp_path / "data.jsonl", [a_row(), a_row(**changes)])
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 2: {message}"):
        load_rows([path])


def test_a_bad_row_of_a_parquet_file_is_named_by_its_index(tmp_path):
    path = write(tmp_path / "data.parquet", [a_row(), a_row(reward_model=None)])
    with pytest.raises(ValueError, match=r"data\.parquet, row 1: reward_model is None"):
        load_rows([path])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("data.jsonl", '{"a": 1}\n{"a":\n', "line 1: has no column"),
        ("data.jsonl", "{oops}\n", "line 1: is not valid JSON"),
        ("data.json", "{oops}", "is not valid JSON"),
        ("data.json", '{"a": 1}', "holds a dict; it must be a list"),
        ("data.json", "[3]", "row 0: is a int"),
        ("data.parquet", "oops", "is no parquet file"),
        ("data.csv", "a,b", r"is not one of \.parquet, \.json, \.jsonl"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        load_rows([tmp_path / name])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*nowhere\.parquet"):
        load_rows([tmp_path / "nowhere.parquet"])


def test_rows_are_read_back_as_they_were_written(tmp_path):
    rows = [Row("a", [{"content": "x", "role": "user"}], "1", "math", "rule", {"index": 0}), Row("b", [], "2")]
    rows[1] = Row("b", [{"content": "y", "role": "system"}], "2", "", "model", {"index": 1})
    assert load_rows([write_rows(tmp_path / "deep" / "rows.parquet", rows)]) == rows
    bare = [Row("a", "x", "1")]
    assert load_rows([write_rows(tmp_path / "bare.parquet", bare)]) == bare


def test_rows_that_parquet_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mixes types"):
        write_rows(tmp_path / "x.parquet", [Row("a", "x", "1"), Row("a", [{"content": "x", "role": "user"}], "1")])
    with pytest.raises(ValueError, match="no rows"):
        write_rows(tmp_path / "x.parquet", [])


class LetterTokenizer:
    """A token a letter; BOS (1) on plain text; a template that puts 2 before each message and 3 where the answer
    starts."""

    name_or_path = "letters"

    def __init__(self, chat_template="there"):
        self.chat_template = chat_template
        self.batches = []

    def apply_chat_template(self, chats, tokenize, add_generation_prompt):
        assert self.chat_template
        assert not tokenize
        assert add_generation_prompt
        return ["".join("\2" + message["content"] for message in chat) + "\3" for chat in chats]

    def __call__(self, texts, add_special_tokens):
        self.batches.append(len(texts))
        return {"input_ids": [[1] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}


def chat(*contents):
    return Row("s", [{"role": "user", "content": content} for content in contents], "8", extra_info={"k": 1})


def tokens_of(row, **options):
    (prompt,) = PromptSet.build([row], LetterTokenizer(), 100, **options).prompts
    return prompt.token_ids.tolist()


def test_messages_go_through_the_chat_template_with_the_start_of_the_answer():
    assert tokens_of(chat("a", "b")) == [2, ord("a"), 2, ord("b"), 3]


def test_plain_text_gets_the_tokenizers_own_special_tokens_and_no_template():
    assert tokens_of(Row("s", "ab", "8")) == [1, ord("a"), ord("b")]


def test_without_the_template_the_contents_are_plain_text_a_line_each():
    assert tokens_of(chat("a", "b"), apply_chat_template=False) == [1, ord("a"), ord("\n"), ord("b")]


def test_prompts_carry_what_the_reward_needs():
    (prompt,) = PromptSet.build([chat("a")], LetterTokenizer(), 100, uid_prefix="v-").prompts
    assert (prompt.uid, prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("v-0", "s", "8", {"k": 1})
    assert prompt.token_ids.dtype == np.int64


def test_order_is_kept_where_plain_and_chat_prompts_mix_over_many_batches():
    rows = [chat(chr(65 + i % 50)) if i % 3 else Row("s", chr(65 + i % 50), "8") for i in range(2500)]
    tokenizer = LetterTokenizer()
    prompts = PromptSet.build(rows, tokenizer, 10).prompts
    assert [prompt.token_ids[1] for prompt in prompts] == [65 + i % 50 for i in range(2500)]
    assert [len(prompt.token_ids) for prompt in prompts] == [3 if i % 3 else 2 for i in range(2500)]
    assert len(tokenizer.batches) == 6  # three batches of chats and of plain texts: no row goes alone


LONG = [Row("s", "abc", "8"), Row("s", "abcdef", "8"), Row("s", "xyz", "8")]  # 4, 7 and 4 tokens with BOS


def test_overlong_prompts_are_dropped_and_counted_and_uids_keep_their_rows():
    result = PromptSet.build(LONG, LetterTokenizer(), 4)
    assert [prompt.uid for prompt in result.prompts] == ["0", "2"]
    assert (len(result), result.num_dropped, result.num_truncated) == (2, 1, 0)


@pytest.mark.parametrize(("overlong", "expected"), [("truncate_left", "cdef"), ("truncate_right", "\1abc")])
def test_overlong_prompts_are_truncated_on_the_named_side(overlong, expected):
    result = PromptSet.build(LONG, LetterTokenizer(), 4, overlong=overlong)
    assert (len(result), result.num_dropped, result.num_truncated) == (3, 0, 1)
    assert_array_equal(result.prompts[1].token_ids, [ord(letter) for letter in expected])


def test_errors_of_tokenising_say_what_to_set():
    with pytest.raises(ValueError, match=r"prompt 1 has 7 tokens.*max_prompt_length = 4.*overlong_prompts"):
        PromptSet.build(LONG, LetterTokenizer(), 4, overlong="error")
    with pytest.raises(ValueError, match=r"no prompt is left of 3 rows: 3 have more than data.max_prompt_length = 2"):
        PromptSet.build(LONG, LetterTokenizer(), 2)
    with pytest.raises(ValueError, match="overlong_prompts is 'left'"):
        PromptSet.build(LONG, LetterTokenizer(), 2, overlong="left")
    with pytest.raises(ValueError, match="prompt 1 .*has no tokens"):
        PromptSet.build([Row("s", "a", "8"), Row("s", "b", "8")], EmptyOnB(), 5)


class EmptyOnB(LetterTokenizer):
    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[] if text == "b" else [5] for text in texts]}


def test_messages_without_a_chat_template_say_what_to_set():
    rows = [Row("s", "plain", "8"), chat("a")]
    with pytest.raises(ValueError, match=r"prompt 1 is chat messages.*'letters'.*data\.apply_chat_template=false"):
        PromptSet.build(rows, LetterTokenizer(chat_template=None), 10)
    assert len(PromptSet.build(rows[:1], LetterTokenizer(chat_template=None), 10)) == 1
    assert len(PromptSet.build(rows, LetterTokenizer(chat_template=None), 10, apply_chat_template=False)) == 2


def a_set(size):
    return PromptSet(tuple(Prompt(str(i), np.array([i]), "s", "8") for i in range(size)), num_dropped=3)


def uids(prompts):
    return [prompt.uid for prompt in prompts]


def test_without_shuffling_the_stream_is_in_row_order_and_drops_the_rest_of_an_epoch():
    stream = PromptStream(a_set(5), 2, seed=0, shuffle=False)
    assert stream.steps_per_epoch == 2
    assert [uids(stream.next()) for _ in range(3)] == [["0-0", "0-1"], ["0-2", "0-3"], ["1-0", "1-1"]]


def test_an_epoch_has_every_prompt_once_and_the_next_is_in_another_order():
    stream = PromptStream(a_set(12), 4, seed=1)
    epochs = [[row for _ in range(3) for row in stream.next()] for _ in range(2)]
    rows = [[uid.split("-")[1] for uid in uids(epoch)] for epoch in epochs]
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(map(str, range(12)))
    assert rows[0] != rows[1]
    assert {uid.split("-")[0] for uid in uids(epochs[1])} == {"1"}


def test_another_seed_is_another_order_and_the_same_seed_the_same():
    first, same, other = (PromptStream(a_set(50), 50, seed=seed).next() for seed in (1, 1, 2))
    assert uids(first) == uids(same) != uids(other)


def test_the_prompts_left_out_differ_from_epoch_to_epoch():
    stream = PromptStream(a_set(5), 4, seed=0)
    seen = {frozenset(uid.split("-")[1] for uid in uids(stream.next())) for _ in range(40)}
    assert len(seen) == 5


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 3), st.integers(0, 12), st.booleans())
def test_a_resumed_stream_goes_on_as_if_it_had_not_stopped(size, per_step, seed, steps, shuffle):
    per_step = min(per_step, size)
    whole = PromptStream(a_set(size), per_step, seed, shuffle)
    for _ in range(steps):
        whole.next()
    saved = json.loads(json.dumps(whole.state_dict()))
    assert whole.state_dict() == saved  # reading it moved nothing
    resumed = PromptStream(a_set(size), per_step, seed, shuffle)
    resumed.next()
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    for _ in range(5):
        batch = whole.next()
        assert len(batch) == per_step
        assert uids(resumed.next()) == uids(batch)


def test_the_cursor_says_where_the_next_batch_starts():
    stream = PromptStream(a_set(5), 2, seed=7)
    cursors = [stream.state_dict()]
    for _ in range(3):
        stream.next()
        cursors.append(stream.state_dict())
    assert [(c["epoch"], c["position"]) for c in cursors] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert stream.epoch == 1
    assert cursors[0] == {
        "epoch": 0,
        "position": 0,
        "returned": [],
        "num_prompts": 5,
        "seed": 7,
        "shuffle": True,
        "curriculum": None,
    }


def test_a_cursor_is_good_for_another_batch_size():
    stream = PromptStream(a_set(6), 2, seed=0, shuffle=False)
    stream.next()
    wider = PromptStream(a_set(6), 4, seed=0, shuffle=False)
    wider.load_state_dict(stream.state_dict())
    assert uids(wider.next()) == ["0-2", "0-3", "0-4", "0-5"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 9}, r"num_prompts = 9, but this run has 6.*data\.train"),
        ({"seed": 5}, r"seed = 5, but this run has 0.*run\.seed"),
        ({"shuffle": False}, r"shuffle = False, but this run has True.*data\.shuffle"),
        ({"position": 7}, "epoch 0, prompt 7 of 6"),
    ],
)
def test_a_cursor_of_other_data_is_refused(changes, message):
    stream = PromptStream(a_set(6), 2, seed=0)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict({**stream.state_dict(), **changes})


def test_any_number_of_prompts_can_be_taken_and_the_next_ones_follow():
    stream = PromptStream(a_set(6), 2, seed=0, shuffle=False)
    assert uids(stream.next(3)) == ["0-0", "0-1", "0-2"]
    assert uids(stream.next(1)) == ["0-3"]
    assert uids(stream.next()) == ["0-4", "0-5"]
    assert uids(stream.next(1)) == ["1-0"]
    assert uids(stream.next(6)) == [f"2-{row}" for row in range(6)]  # only five were left of epoch 1
    assert uids(stream.next(8)) == [*(f"3-{row}" for row in range(6)), "4-0", "4-1"]  # more than there are


def test_what_is_given_back_comes_first_and_as_it_was():
    stream = PromptStream(a_set(8), 2, seed=0, shuffle=False)
    taken = stream.next(4)
    stream.put_back(taken[1:3])
    stream.put_back(taken[3:])
    assert uids(stream.next(1)) == ["0-3"]
    (prompt,) = stream.next(1)
    assert (prompt.uid, prompt.token_ids.tolist()) == ("0-1", [1])
    assert uids(stream.next()) == ["0-2", "0-4"]


def test_a_prompt_that_comes_again_leaves_room_in_its_epoch():
    """One of five is left, which a step of two has no use for alone; with one that was given back it has."""
    stream = PromptStream(a_set(5), 2, seed=0, shuffle=False)
    taken = stream.next(4)
    assert stream.epoch == 1
    stream.put_back(taken[2:3])
    assert stream.epoch == 0
    cursor = json.loads(json.dumps(stream.state_dict()))
    assert (cursor["epoch"], cursor["position"], cursor["returned"]) == (0, 4, ["0-2"])
    assert uids(stream.next()) == ["0-2", "0-4"]
    resumed = PromptStream(a_set(5), 2, seed=0, shuffle=False)
    resumed.load_state_dict(cursor)
    assert uids(resumed.next()) == ["0-2", "0-4"]


@given(
    st.integers(2, 20),
    st.integers(1, 6),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=8),
    st.integers(0, 7),
)
def test_a_stream_resumed_with_returned_prompts_goes_on_as_if_it_had_not_stopped(
    size, per_step, seed, shuffle, steps, at
):
    """Steps that take some more than per_step and give some back; the cursor is saved before step `at`."""
    per_step = min(per_step, size)

    def walk(stream, steps):
        found = []
        for more, back in steps:
            taken = stream.next(per_step + more)
            found.append([(prompt.uid, prompt.token_ids.tolist()) for prompt in taken])
            assert len(set(uids(taken))) == per_step + more
            stream.put_back(taken[len(taken) - min(back, len(taken)) :])
        return found

    steps = [*steps, (0, 0), (0, 0)]
    whole, stopped, resumed = (PromptStream(a_set(size), per_step, seed, shuffle) for _ in range(3))
    expected = walk(whole, steps)
    assert walk(stopped, steps[:at]) == expected[:at]
    saved = json.loads(json.dumps(stopped.state_dict()))
    resumed.next()
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert walk(resumed, steps[at:]) == expected[at:]


def test_a_cursor_without_returned_prompts_is_of_before_there_were_any():
    stream = PromptStream(a_set(6), 2, seed=0, shuffle=False)
    stream.put_back(stream.next())
    stream.load_state_dict({"epoch": 1, "position": 2, "num_prompts": 6, "seed": 0, "shuffle": False})
    assert uids(stream.next()) == ["1-2", "1-3"]


@pytest.mark.parametrize("uid", ["0-6", "7", "v-"])
def test_a_prompt_to_ask_again_that_is_not_there_is_refused(uid):
    stream = PromptStream(a_set(6), 2, seed=0)
    with pytest.raises(ValueError, match=rf"prompt {uid} to ask again, but data\.train has no such row"):
        stream.load_state_dict({**stream.state_dict(), "returned": ["0-5", uid]})


def test_too_few_prompts_are_refused_with_the_numbers():
    with pytest.raises(
        ValueError, match=r"5 prompts \(3 more were dropped as overlong\), fewer than.*prompts_per_step = 6"
    ):
        PromptStream(a_set(5), 6, seed=0)
    with pytest.raises(ValueError, match="prompts_per_step is 0"):
        PromptStream(a_set(5), 0, seed=0)
    with pytest.raises(ValueError, match="run.seed is -1"):
        PromptStream(a_set(5), 1, seed=-1)


# ------------------------------------------------------------------------------------------------ a curriculum


def easy_first(epoch, prompts):
    """By length of the prompt, one prompt more each epoch, from two on."""
    return sorted(range(len(prompts)), key=lambda i: (len(prompts[i].token_ids), i))[: 2 + epoch]


def curriculum_stream(prompts_per_step=2, curriculum=easy_first):
    lengths = [5, 1, 4, 2, 3]
    prompts = tuple(Prompt(str(i), np.zeros(n, np.int64), "s", "") for i, n in enumerate(lengths))
    return PromptStream(PromptSet(prompts, 0, 0), prompts_per_step, 1, curriculum=curriculum)


def test_a_curriculum_says_which_prompts_an_epoch_has_and_in_which_order():
    """Rows by length: 1, 3, 4, 2, 0. Epochs of 2, 3, 4 and 5 prompts; of an odd one the last is left out."""
    stream = curriculum_stream()
    found = [[p.uid for p in stream.next()] for _ in range(6)]
    assert found == [["0-1", "0-3"], ["1-1", "1-3"], ["2-1", "2-3"], ["2-4", "2-2"], ["3-1", "3-3"], ["3-4", "3-2"]]


@pytest.mark.parametrize("steps", range(6))
def test_a_curriculum_goes_on_where_it_stood(steps):
    whole, stopped, resumed = curriculum_stream(), curriculum_stream(), curriculum_stream()
    for _ in range(steps):
        whole.next()
        stopped.next()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for _ in range(4):
        assert [p.uid for p in whole.next()] == [p.uid for p in resumed.next()]


def test_a_curriculum_that_fails_is_an_error_with_the_epoch():
    def by_difficulty(epoch, prompts):
        return sorted(range(len(prompts)), key=lambda i: prompts[i].extra_info["difficulty"])

    with pytest.raises(ValueError, match=r"data\.curriculum: failed for epoch 0: KeyError: 'difficulty'"):
        curriculum_stream(curriculum=by_difficulty)


def test_a_run_with_another_curriculum_does_not_resume():
    state = curriculum_stream().state_dict()
    with pytest.raises(ValueError, match=r"curriculum = easy_first, but this run has None.*data\.curriculum"):
        curriculum_stream(curriculum=None).load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([1], "has 1 prompts, fewer than data.prompts_per_step = 2"),
        ([0, 5], "0 to 4 at most once, but has 0 to 5"),
        ([0, 1, 1], "2 different ones of 3"),
        ([0.5, 1.0], "no list of whole numbers"),
    ],
)
def test_a_curriculum_that_gives_nonsense_is_an_error_with_the_epoch(rows, words):
    with pytest.raises(ValueError, match=words) as raised:
        curriculum_stream(curriculum=lambda epoch, prompts: rows)
    assert "data.curriculum: epoch 0" in str(raised.value)


def test_a_prompt_keeps_what_was_tokenised_where_that_is_asked_for() -> None:
    """Whole, also where its tokens are cut."""
    rows = [chat("abc"), Row("s", "abcd", "x")]
    cut = PromptSet.build(rows, LetterTokenizer(), 2, "truncate_left", keeps_content=True).prompts
    assert [prompt.content for prompt in cut] == [rows[0].prompt, "abcd"]
    assert {prompt.content for prompt in PromptSet.build(rows, LetterTokenizer(), 100).prompts} == {""}
