"""What fits on a GPU, by hand, and what is said of what does not."""

from __future__ import annotations

from typing import Any

import pytest

from megarl import config
from megarl.config import Config
from megarl.ops.capacity import (
    Room,
    answers_a_replica,
    decode_limits,
    overfull,
    room,
    together,
    trainer_peaks,
)
from megarl.ops.memory import EngineMemory, Usage

GB = 10**9

ENGINE = EngineMemory(weights=GB, kv_token=10_000)

ROLES = Usage(start=10 * GB, training={"actor": 30 * GB, "critic": 25 * GB}, sync=12 * GB, generation=11 * GB)


def loaded(**rollout: Any) -> Config:
    """256 prompts of at most 768 tokens with their answers, one replica."""
    sections: dict[str, Any] = rollout.pop("sections", {})
    return config.build({"model": {"create": {}}, "data": {"create": {}}, "rollout": rollout, **sections})


def of(answers: int, gpu: int = 80) -> Room:
    """A KV cache that holds so many answers."""
    return Room(gpu, 70 * GB, 35 * GB, answers * 768 * 10_000, answers * 768, answers)


# ------------------------------------------------------------------------------------------------ KV cache


def test_sglang_takes_its_share_of_what_the_roles_leave() -> None:
    """Half of 80 - 10 GB, less 1 GB of weights, over 10,000 bytes: 3,400,000 tokens, 4,427 times 768."""
    found = room(loaded(sglang={"memory_fraction": 0.5}), ENGINE, ROLES, 80)
    assert found == Room(80, 70 * GB, 35 * GB, 34 * GB, 3_400_000, 4427)


def test_on_gpus_of_its_own_all_is_free() -> None:
    found = room(loaded(num_gpus=1, sglang={"memory_fraction": 0.5}), ENGINE, None, 80)
    assert (found.free, found.kv_cache) == (80 * GB, 39 * GB)


def test_a_share_that_the_weights_exceed_holds_no_token() -> None:
    found = room(loaded(sglang={"memory_fraction": 0.01}), ENGINE, ROLES, 80)
    assert (found.kv_cache, found.tokens, found.answers) == (-3 * GB // 10, 0, 0)


def test_answers_that_a_replica_is_asked_for() -> None:
    """256 prompts x 4 answers over 2 replicas; half as many prompts more; with remax's fifth answer to each."""
    two = {"cluster": {"gpus_per_node": 2}}
    grpo = {**two, "algorithm": {"advantage": "grpo"}}
    remax = {**two, "algorithm": {"advantage": "remax"}}
    assert answers_a_replica(loaded(n=4, sections=grpo)) == 512
    assert answers_a_replica(loaded(n=4, oversample=1.5, sections=grpo)) == 768
    assert answers_a_replica(loaded(n=4, sections=remax)) == 640
    # 1.1 is above 11 / 10 as a floating-point number: 100 x 1.1 would be 111 prompts.
    hundred = {"data": {"create": {}, "prompts_per_step": 100}, "actor": {"batch": {"mini_batch_prompts": 100}}}
    assert answers_a_replica(loaded(n=4, oversample=1.1, sections={**grpo, **hundred})) == 220


def test_the_least_of_three_runs_together() -> None:
    assert together(loaded(), of(1000)) == 256
    assert together(loaded(sglang={"max_running_requests": 200}), of(1000)) == 200
    assert together(loaded(sglang={"max_running_requests": 200}), of(100)) == 100


# ------------------------------------------------------------------------------------------------ remarks


def test_nothing_is_said_where_nothing_limits() -> None:
    assert decode_limits(loaded(), ENGINE, [of(256), of(5000, 141)]) == []


@pytest.mark.parametrize(
    ("options", "rooms", "said"),
    [
        (
            {"max_running_requests": 128},
            [of(5000)],
            "of 256 answers a replica, at most 128 run together: raise rollout.sglang.max_running_requests",
        ),
        (
            {},
            [of(128), of(256, 141)],
            "on a GPU of 80 GB 128 of 256 answers a replica fit into the KV cache at full length: raise "
            "rollout.sglang.memory_fraction or rollout.tensor",
        ),
        (
            {"cuda_graph_max_batch": 64},
            [of(100), of(200, 141)],
            "200 answers run together, but batches above 64 have no CUDA graph: raise "
            "rollout.sglang.cuda_graph_max_batch",
        ),
        (
            {},
            [Room(80, 70 * GB, GB // 2, -GB // 2, 0, 0)],
            "on a GPU of 80 GB SGLang's share does not hold its weights: raise rollout.sglang.memory_fraction above "
            "0.02, or rollout.tensor",
        ),
        (
            {},
            [Room(80, GB // 2, GB // 4, -3 * GB // 4, 0, 0)],
            "on a GPU of 80 GB SGLang's weights do not fit into the 0.5 GB that are free: raise rollout.tensor, or "
            "offload the roles",
        ),
    ],
)
def test_what_limits_decode_is_said(options: dict[str, Any], rooms: list[Room], said: str) -> None:
    assert said in decode_limits(loaded(sglang=options), ENGINE, rooms)


def test_eager_needs_no_graphs() -> None:
    assert decode_limits(loaded(sglang={"cuda_graph_max_batch": 64, "eager": True}), ENGINE, [of(256)]) == []


# ------------------------------------------------------------------------------------------------ phases


@pytest.mark.parametrize(
    ("rollout", "share", "expected"),
    [
        # asleep while training; its weights and two buckets at the sync; its share at the end
        ({}, 35, {"actor": 30, "critic": 25, "sync": 12 + 1 + 2 * 2, "generation": 11 + 35}),
        ({"sglang": {"sleep": False}}, 35, {"actor": 65, "critic": 60, "sync": 12 + 35 + 4, "generation": 46}),
        ({"engine": "hf"}, 1, {"actor": 31, "critic": 26, "sync": 12 + 1 + 4, "generation": 12}),
    ],
)
def test_peaks_of_a_shared_gpu(rollout: dict[str, Any], share: int, expected: dict[str, int]) -> None:
    assert trainer_peaks(loaded(**rollout), ROLES, GB, share * GB, 2 * GB) == {
        "the actor trains": expected["actor"] * GB,
        "the critic trains": expected["critic"] * GB,
        "weights are synced": expected["sync"] * GB,
        "answers are generated": expected["generation"] * GB,
    }


def test_peaks_of_a_trainer_whose_engine_is_elsewhere() -> None:
    assert trainer_peaks(loaded(num_gpus=1), ROLES, 0, 0, 2 * GB) == {
        "the actor trains": 30 * GB,
        "the critic trains": 25 * GB,
        "weights are synced": 16 * GB,
    }


def test_what_does_not_fit_is_said_for_each_gpu() -> None:
    assert overfull({80: {"the actor trains": 81 * GB}, 141: {"the actor trains": 81 * GB}}) == [
        "on a GPU of 80 GB 81.0 GB do not fit while the actor trains: offload more, or split the roles over more GPUs"
    ]
    assert overfull({80: {"answers are generated": 80 * GB}}) == []
    (said,) = overfull({80: {"answers are generated": 80 * GB + 1}})
    assert said.endswith("offload more, or lower the engine's share")
