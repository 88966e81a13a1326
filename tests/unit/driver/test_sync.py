"""The order of a weight sync as the driver leads it, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megarl import config
from megarl.driver.sync import WeightSync
from megarl.model.families import declare
from megarl.reshard.checksum import piece_checksums
from megarl.reshard.layouts import sglang_layout

SHAPE = LlamaConfig(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=2, intermediate_size=6, num_hidden_layers=1, vocab_size=64
)
CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "cluster": {"gpus_per_node": 4},
        "rollout": {"tensor": 2, "n": 2},
        "algorithm": {"advantage": "rloo"},
    }
)
TARGET = sglang_layout(declare(SHAPE), 2, 2, 64)


class Rollout:
    embedded = False

    def __init__(self, events: list[Any], dtype: str = "bfloat16") -> None:
        self.events, self.dtype = events, dtype
        self.sums: list[list[int]] = []

    def parameters(self) -> Any:
        return [
            [
                {
                    name: (tuple(shape), self.dtype)
                    for name, shape in TARGET.shard(2 * replica + rank).parameters.items()
                }
                for rank in range(2)
            ]
            for replica in range(2)
        ]

    def load_bucket(self, payloads: list[bytes]) -> None:
        self.events.append(payloads)

    def set_version(self, version: int) -> None:
        self.events.append(version)

    def checksums(self, regions: Any) -> list[list[int]]:
        self.events.append("checksums")
        return self.sums


class Group:
    """Four ranks; rank r hosts target rank r, and rank 3 has nothing for it in the second bucket."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.source: list[list[int]] = []

    def call(self, stage: str, method: str, *arguments: Any) -> list[Any]:
        if method == "prepare_sync":
            assert arguments[1] == [0, 1, 2, 3]
            return [{"num_buckets": 2, "summary": "two buckets"}] * 4
        if method == "sync_checksums":
            return [(sums, {}) for sums in self.source]
        assert method == "sync_bucket"
        (bucket,) = arguments
        self.events.append(f"exchange {bucket}")
        return [{r: f"{bucket}{r}".encode()} if (bucket, r) != (1, 3) else {} for r in range(4)]


def test_buckets_are_loaded_one_after_another_then_verified_then_stamped() -> None:
    events: list[Any] = []
    sync = WeightSync(CONFIG, Group(events), Rollout(events), SHAPE)  # type: ignore[arg-type]
    sync.prepare()
    assert (sync.num_buckets, sync.summary) == (2, "two buckets")
    sync._verify = lambda: events.append("verify")  # type: ignore[method-assign]
    timings = sync.run(7)
    assert events == [
        "exchange 0",
        [b"00", b"01", b"02", b"03"],
        "exchange 1",
        [b"10", b"11", b"12", b""],
        "verify",
        7,
    ]
    assert timings.keys() == {"timing_s/sync_move", "timing_s/sync_verify"}


def test_a_tensor_that_did_not_arrive_is_named_and_nothing_is_stamped() -> None:
    """The engine's checksums are those of other weights in one layer norm of the second replica."""
    events: list[Any] = []
    group, rollout = Group(events), Rollout(events)
    sync = WeightSync(CONFIG, group, rollout, SHAPE)  # type: ignore[arg-type]

    def zeros(layout: Any, rank: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(tuple(shape)) for name, shape in layout.shard(rank).parameters.items()}

    def sums(layout: Any, rank: int, parameters: dict[str, torch.Tensor]) -> list[int]:
        return piece_checksums(layout.shard(rank).pieces, parameters, layout, torch.float32)

    group.source = [sums(sync._source, r, zeros(sync._source, r)) for r in range(4)]
    rollout.sums = [sums(TARGET, r, zeros(TARGET, r)) for r in range(4)]
    sync.run(1)
    assert events[-1] == 1
    events.clear()
    wrong = zeros(TARGET, 3)
    wrong["model.layers.0.mlp.down_proj.weight"][2, 1] = 1.0
    rollout.sums[3] = sums(TARGET, 3, wrong)
    with pytest.raises(ValueError, match=r"rollout replica 1") as caught:
        sync.run(2)
    assert "model.layers.0.mlp.down_proj.weight" in str(caught.value)
    assert 2 not in events


def test_an_engine_of_another_precision_is_refused() -> None:
    sync = WeightSync(CONFIG, SimpleNamespace(), Rollout([], "float32"), SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SGLang replica 0, tensor rank 0: parameter .* is float32, but .* bfloat16"):
        sync.prepare()
