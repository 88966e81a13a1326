"""Throughput, time per token, MFU and validation metrics, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import config
from megarl.driver.rollout import RolloutBatch, RolloutFigures
from megarl.driver.step_metrics import Flops, step_metrics, validation_metrics
from megarl.types import Activity, SampleInfo
from megarl.workers.generation import Group


def info(prompt: int, response: int, score: float = 0.0, source: str = "s", **changes: Any) -> SampleInfo:
    values = {"finish_reason": "stop", "reward_error": None, **changes}
    return SampleInfo("u", "g", prompt, response, response, score, data_source=source, min_weight_version=0, **values)


def batch(*groups: list[SampleInfo]) -> RolloutBatch:
    return RolloutBatch([Group(tuple(infos), None) for infos in groups])


# A layer with hidden 4, 2 heads of 2, 1 KV head, FFN 8: 4 x 2 x (2 x 2 + 2 x 1) + 3 x 4 x 8 = 48 + 96 = 144 parameters.
# With 10 words the output layer has 40.
SHAPE = SimpleNamespace(
    hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, num_hidden_layers=1, vocab_size=10
)
MADE = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}, "max_response_length": 5, "max_prompt_length": 4},
        "cluster": {"gpus_per_node": 2},
        "actor": {"batch": {"epochs": 2}},
    }
)
BATCH = batch(
    [info(3, 5, finish_reason="length"), info(3, 2, finish_reason="abort")],
    [info(4, 3, reward_error="x"), info(2, 2)],
)
SECONDS = {"step": 4.0, "gen": 1.2, "adv": 0.024, "update_actor": 0.5, "update_critic": 0.25}


def test_throughput_and_times_by_hand() -> None:
    """Prompts 3 + 3 + 4 + 2 = 12, responses 5 + 2 + 3 + 2 = 12: 24 tokens in 4 s on 2 GPUs."""
    found = step_metrics(MADE, BATCH, SECONDS, Flops(SHAPE, SHAPE, None), {"max_memory_allocated_gb": 7.5})
    expected = {
        "perf/total_num_tokens": 24.0,
        "perf/time_per_step": 4.0,
        "perf/throughput": 3.0,
        "perf/max_memory_allocated_gb": 7.5,
        "timing_s/step": 4.0,
        "timing_s/gen": 1.2,
        "timing_per_token_ms/gen": 100.0,
        "timing_per_token_ms/adv": 1.0,
        "response_length/mean": 3.0,
        "response_length/clip_ratio": 0.25,
        "response_length/aborted_ratio": 0.25,
        "prompt_length/max": 4.0,
        "prompt_length/clip_ratio": 0.25,
        "reward/failed": 1.0,
        "reward/timed_out": 0.0,
        "timing_s/reward": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "timing_per_token_ms/ref" not in found
    assert not [name for name in found if "mfu" in name]


def test_the_wait_for_scores_is_a_stage_of_its_own() -> None:
    """The second replica was done last, at 1.1 s: it waited 1.1 - 0.8 = 0.3 s for scores, of the 1.2 s that the driver
    saw. One reward of two failures timed out."""
    late = [info(3, 5, reward_error="reward timed out after 5 s"), info(3, 2, reward_error="KeyError")]
    groups = [
        Group(tuple(late), None, ended=(0.1, 0.2), scored=1.0),
        Group(tuple(late), None, ended=(0.8, 0.3), scored=1.1),
    ]
    waited = RolloutBatch(groups)
    found = step_metrics(MADE, waited, SECONDS, Flops(SHAPE, SHAPE, None), {})
    assert found["timing_s/reward"] == pytest.approx(0.3)
    assert found["timing_s/gen"] == pytest.approx(0.9)
    assert found["timing_s/step"] == 4.0
    assert (found["reward/failed"], found["reward/timed_out"]) == (4.0, 2.0)


def test_how_generation_went() -> None:
    """The answers have 5 + 2 + 3 + 1 = 11 tokens, in 1.1 s; nothing is learned from the last one."""
    infos = [info(3, 5), info(3, 2), info(4, 3), replace(info(2, 1), num_loss_tokens=0)]
    figures = RolloutFigures(Activity(7, 12.5, 16.0, 3.5, 8.0, 0.75), 0.25, 0.4, 0.35)
    made = RolloutBatch([Group(tuple(infos), None)], figures)
    found = step_metrics(MADE, made, {**SECONDS, "gen": 1.1}, Flops(SHAPE, SHAPE, None), {})
    assert {name: value for name, value in found.items() if name.startswith("rollout/")} == pytest.approx(
        {
            "rollout/cache_hit_rate": 0.35,
            "rollout/idle_share": 0.25,
            "rollout/tail_share": 0.4,
            "rollout/tokens_per_s": 10.0,
            "rollout/running_mean": 12.5,
            "rollout/running_max": 16.0,
            "rollout/waiting_mean": 3.5,
            "rollout/waiting_max": 8.0,
            "rollout/kv_cache_use_max": 0.75,
        }
    )


def test_an_engine_that_was_not_looked_at_says_nothing_of_its_load() -> None:
    """The hf engine."""
    found = step_metrics(MADE, BATCH, SECONDS, Flops(SHAPE, SHAPE, None), {})
    names = {name.removeprefix("rollout/") for name in found if name.startswith("rollout/")}
    assert names == {"cache_hit_rate", "idle_share", "tail_share", "tokens_per_s"}


def test_mfu_by_hand() -> None:
    """Attention: 2 x 1 layer x width 4 x (8^2 + 5^2 + 7^2 + 4^2 = 154) = 1,232, three times for training.

    Actor: 6 x 184 x 24 + 3 x 1,232 = 30,192; two epochs; 0.5 s x 1e6 FLOP/s x 2 GPUs = 1e6.
    Critic (output layer 4): 6 x 148 x 24 + 3,696 = 25,008 in 0.25 s.
    verl counts the embedding too: 40 parameters more, 6 x 40 x 24 = 5,760.
    """
    found = step_metrics(MADE, BATCH, SECONDS, Flops(SHAPE, SHAPE, 1e6), {})
    assert found["perf/mfu/actor"] == pytest.approx(2 * 30_192 / 1e6)
    assert found["perf/mfu/critic"] == pytest.approx(25_008 / 0.5e6)
    assert found["perf/mfu_verl/actor"] == pytest.approx(2 * 35_952 / 1e6)
    warm_up = {name: seconds for name, seconds in SECONDS.items() if name != "update_actor"}
    assert "perf/mfu/actor" not in step_metrics(MADE, BATCH, warm_up, Flops(SHAPE, SHAPE, 1e6), {})


def test_validation_by_hand() -> None:
    """Two sources, two answers each prompt. std is over a prompt's answers: of (1, 0) it is 0.5, of (3, 0) 1.5."""
    given = batch(
        [info(1, 2, 1.0, "a"), info(1, 4, 0.0, "a")],
        [info(1, 2, 3.0, "b"), info(1, 4, 0.0, "b")],
        [info(1, 2, 1.0, "a"), info(1, 4, 1.0, "a")],
    )
    assert validation_metrics(given, 2) == pytest.approx(
        {
            "val-aux/all/reward/mean": 1.0,
            "val-core/a/reward/mean@2": 0.75,
            "val-core/a/reward/best@2": 1.0,
            "val-aux/a/reward/std@2": 0.25,
            "val-core/b/reward/mean@2": 1.5,
            "val-core/b/reward/best@2": 3.0,
            "val-aux/b/reward/std@2": 1.5,
            "val-aux/all/response_length/mean": 3.0,
        }
    )


def test_validation_with_one_answer_has_neither_best_nor_std() -> None:
    found = validation_metrics(batch([info(1, 2, 1.0, "a")], [info(1, 2, 0.0, "a")]), 1)
    assert {name for name in found if "/a/" in name} == {"val-core/a/reward/mean@1"}
    assert found["val-core/a/reward/mean@1"] == 0.5
