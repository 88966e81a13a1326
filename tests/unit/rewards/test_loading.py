"""Rewards by name, and failures that become a score of 0 with a reason."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from megarl.rewards import load_reward, score_safely
from megarl.rewards.loading import score_many

MODULE = """
import math
NOT_A_FUNCTION = 3

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "source": data_source, **kwargs}

def two(response, ground_truth):
    return 0.0

def bonus(data_source, response, ground_truth, extra_info, *, bonus=0.0):
    return bonus + extra_info["base"]

class Judge:
    def __call__(self, data_source, response, ground_truth, extra_info):
        return 0.5

judge = Judge()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module called my_rewards on the Python path, and two that cannot be imported."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "needs_something.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_rewards"
    import sys

    for name in ("my_rewards", "needs_something", "broken"):
        sys.modules.pop(name, None)


def test_a_function_of_verls_works_as_it_is(module):
    function = load_reward("my_rewards:compute_score")
    assert score_safely(function, "s", "8", "8", {}) == (1.0, None)
    assert score_safely(function, "s", "9", "8", {}) == (0.0, None)


def test_options_reach_the_function(module):
    function = load_reward("my_rewards:bonus", {"bonus": 0.25})
    assert function("s", "8", "8", {"base": 1.0}) == 1.25


def test_any_callable_will_do(module):
    assert score_safely(load_reward("my_rewards:judge"), "s", "8", "8", {}) == (0.5, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gsm9k",
            "unknown reward function 'gsm9k'; give gsm8k, gsm8k_flexible, exact, .*or your own as package.module",
        ),
        ("my/rewards.py:score", "not a file's path"),
        ("my_rewards:", "unknown reward function"),
        ("no_such_module:score", "there is no module 'no_such_module'.*PYTHONPATH"),
        ("my_rewards.inner:score", r"there is no module 'my_rewards\.inner'"),
        ("needs_something:score", "needs_something imports 'a_package_that_is_not_there', which is not installed"),
        ("broken:score", r"importing broken failed: ZeroDivisionError: division by zero \(broken\.py:1\)"),
        ("my_rewards:compute", "has no 'compute'; it has compute_score, two, bonus"),
        ("my_rewards:NOT_A_FUNCTION", "is a int, which cannot be called"),
        ("my_rewards:two", "cannot be called as function"),
    ],
)
def test_what_cannot_be_loaded_says_why(module, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name)


def test_an_option_that_the_function_does_not_take_is_an_error():
    with pytest.raises(ValueError, match=r"extra_info, strictness=\.\.\.\).*'strictness'"):
        load_reward("gsm8k", {"strictness": 1})


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        ({"score": 0.5, "format": 1}, 0.5),
        (-2.0, -2.0),
    ],
)
def test_numbers_of_every_kind_are_scores(result, score):
    got, error = score_safely(lambda *_: result, "s", "8", "8", {})
    assert (got, error) == (score, None)
    assert type(got) is float


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (math.nan, "gave nan, which is not finite"),
        ({"score": math.inf}, "gave inf, which is not finite"),
        (None, "gave None, which is no number"),
        ("1.0", "gave '1.0', which is no number"),
        ({"reward": 1.0}, "a mapping without 'score': it has reward"),
        (torch.tensor([0.5, 0.5]), "which is no number"),
        (1j, "which is no number"),
        (10**400, "OverflowError"),
    ],
)
def test_what_is_no_number_scores_zero_with_the_reason(result, reason):
    score, error = score_safely(lambda *_: result, "s", "8", "8", {})
    assert score == 0.0
    assert reason in error


def test_an_asynchronous_function_is_awaited_in_one_loop():
    loops = []

    async def judge(data_source, response, ground_truth, extra_info):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return float(response)

    async def fails(*_):
        raise KeyError("missing")

    assert score_safely(judge, "s", "8", "8", {}) == (8.0, None)
    assert score_safely(judge, "s", "9", "8", {}) == (9.0, None)
    assert loops[0] is loops[1]
    assert score_safely(fails, "s", "8", "8", {})[1].startswith("KeyError: 'missing'")


CALLS = [("s", "8", "8", {"index": 0}), ("t", "9", "8", {"index": 1})]


def batched(result):
    """A function that takes lists and gives `result`, or what it makes of its arguments."""

    def score(sources, responses, truths, infos):
        return result(sources, responses, truths, infos) if callable(result) else result

    score.batch_size = 4
    return score


def test_a_function_with_a_batch_size_gets_lists():
    seen = []
    function = batched(lambda *lists: seen.append(lists) or np.array([0.5, math.nan]))
    assert score_many(function, CALLS) == [
        (0.5, None),
        (0.0, "the reward function gave nan, which is not finite"),
    ]
    assert seen == [(["s", "t"], ["8", "9"], ["8", "8"], [{"index": 0}, {"index": 1}])]


async def _halves():
    return [0.5, {"score": 1}]


def test_a_batched_function_may_be_asynchronous():
    assert score_many(batched(lambda *_: _halves()), CALLS) == [(0.5, None), (1.0, None)]


@pytest.mark.parametrize(
    ("result", "reason"),
    [([1.0], "gave 1 scores for 2 answers"), (1.0, "TypeError"), (lambda *_: 1 / 0, "ZeroDivisionError")],
)
def test_a_batch_fails_as_one(result, reason):
    found = score_many(batched(result), CALLS)
    assert [score for score, _ in found] == [0.0, 0.0]
    assert all(reason in error for _, error in found)


def test_a_function_without_a_batch_size_is_called_for_each():
    assert score_many(lambda s, r, t, i: r == t, CALLS) == [(1.0, None), (0.0, None)]


def test_a_reason_is_one_line_of_bounded_length():
    def fails(*_):
        raise ValueError("x" * 10_000 + "\nsecond line")

    _, error = score_safely(fails, "s", "8", "8", {})
    assert len(error) < 400
    assert "second" not in error


def test_an_exception_scores_zero_with_the_line_it_came_from():
    def fails(data_source, response, ground_truth, extra_info):
        raise KeyError("missing")

    score, error = score_safely(fails, "s", "8", "8", {})
    assert score == 0.0
    assert error.startswith("KeyError: 'missing' (test_loading.py:")


def test_arguments_come_in_order_and_extra_info_is_a_copy():
    seen = []
    info = {"index": 1}

    def takes(data_source, response, ground_truth, extra_info):
        seen.append((data_source, response, ground_truth, dict(extra_info)))
        extra_info["index"] = 2
        return 0

    score_safely(takes, "source", "response", "truth", info)
    assert seen == [("source", "response", "truth", {"index": 1})]
    assert info == {"index": 1}


def test_ctrl_c_is_not_swallowed():
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_safely(interrupted, "s", "8", "8", {})
