"""A weight sync as the driver leads it, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megarl import config
from megarl.driver import sync as driver_sync
from megarl.driver.sync import PATIENCE, WeightSync, gather_both
from megarl.model.families import declare
from megarl.reshard.channel import UNVERIFIED, Difference, LoadReport
from megarl.reshard.checksum import piece_regions
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import sglang_layout
from megarl.reshard.plan import Place
from megarl.reshard.regions import RegionSums
from megarl.workers.calls import Callee, WorkerError
from megarl.workers.placement import Seat
from megarl.workers.weights import Facts, SyncReport, SyncTerms

SHAPE = LlamaConfig(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=2, intermediate_size=6, num_hidden_layers=1, vocab_size=64
)
CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "cluster": {"gpus_per_node": 4},
        "rollout": {"tensor": 2, "n": 2},
        "run": {"deadline": 100},
        "algorithm": {"advantage": "rloo"},
    }
)
TARGET = sglang_layout(declare(SHAPE), 2, 2, 64)


def zeros(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tuple(shape)) for name, shape in layout.shard(rank).parameters.items()}


def sums(layout: Layout, rank: int, parameters: dict[str, torch.Tensor]) -> list[int]:
    return RegionSums(piece_regions(layout.shard(rank).pieces, parameters, layout), torch.float32).run()


class Method:
    """A remote method: the call's reference is what it will give."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Rollout:
    """Two replicas of two ranks."""

    embedded = False

    def __init__(self, events: list[Any], dtype: str = "bfloat16", missing: str = "") -> None:
        self.events, self.dtype, self.missing = events, dtype, missing
        self.dead: dict[int, str] = {}
        self.loaded = [LoadReport(sums(TARGET, r, zeros(TARGET, r)), [], 0, 0.0, 0.0) for r in range(4)]

    def parameters(self) -> Any:
        return [
            [
                {
                    name: (tuple(shape), self.dtype)
                    for name, shape in TARGET.shard(2 * replica + rank).parameters.items()
                    if name != self.missing
                }
                for rank in range(2)
            ]
            for replica in range(2)
        ]

    def start_sync(self, number: int, sockets: list[str], version: int, deadline: float) -> Any:
        self.events.append(("replicas", number, sockets, version, deadline))
        return [(self.loaded[2 * replica : 2 * replica + 2], Callee(f"replica {replica}", "h")) for replica in range(2)]

    def set_version(self, version: int) -> None:
        self.events.append(version)

    def find_dead(self, patience: float) -> dict[int, str]:
        return self.dead


class Group:
    """Four ranks; rank r hosts target rank r."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.sent: list[SyncReport] = []
        self.seats = [Seat("n", "h", "address", rank, "", rank) for rank in range(4)]
        self.actors = [SimpleNamespace(sync=Method(partial(self.sync, rank))) for rank in range(4)]
        self.actors[0].open_store = Method(lambda address: f"port at {address}")
        self.actors[0].layout = Method(lambda role: f"{role}'s layout")
        self.lost: list[set[int]] = [set()] * 4
        self.terms: list[SyncTerms] = []

    def sync(self, rank: int, *arguments: Any) -> SyncReport:
        self.events.append((rank, *arguments))
        return self.sent[rank]

    def call(self, stage: str, method: str, *arguments: Any) -> list[Any]:
        if method == "sync":
            return [self.sync(rank, *arguments) for rank in range(4)]
        if method == "set_version":
            self.events.append(arguments[0])
            return []
        if method == "lost_replicas":
            return self.lost
        assert method == "prepare_sync"
        self.terms.extend(arguments)
        hosted = [t for t in range(4) if self.terms[-1].hosts[t] == t]
        summary: Any = "two buckets"
        return [Facts(2, summary, {r: f"s{r}"} if r in hosted else {}) for r in range(4)]


class Receivers:
    """Four, two on each of two other nodes."""

    def __init__(self, events: list[Any]) -> None:
        self.seats = [Seat(f"m{t // 2}", f"host{t // 2}", "", 4 + t % 2, "", 4 + t) for t in range(4)]
        self.callees = [Callee(f"receiver {t}", f"host{t // 2}") for t in range(4)]
        self.dead: list[int] = []
        self.lost: list[set[int]] = [set()] * 4
        self.prepared: list[Any] = []

        def prepare(target: int, *arguments: Any) -> Facts:
            self.prepared.append(arguments)
            return Facts(2, None, {target: f"r{target}"})

        def sync(target: int, *arguments: Any) -> SyncReport:
            events.append((f"receiver {target}", *arguments))
            return SyncReport([], {}, 0.0)

        self.actors = [
            SimpleNamespace(
                prepare_sync=Method(partial(prepare, t)),
                sync=Method(partial(sync, t)),
                lost_replicas=Method(lambda t=t: self.lost[t]),
            )
            for t in range(4)
        ]

    def replace_dead(self) -> list[int]:
        return self.dead


@pytest.fixture
def events() -> list[Any]:
    return []


@pytest.fixture
def sync(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> WeightSync:
    """All parameters are zero on both sides; `gather` gives the references back."""
    monkeypatch.setattr(driver_sync, "gather", lambda refs, callees, stage, deadline: refs)
    group = Group(events)
    made = WeightSync(CONFIG, group, Rollout(events), SHAPE)  # type: ignore[arg-type]
    source = made._source
    group.sent = [SyncReport(sums(source, r, zeros(source, r)), {}, 0.0) for r in range(4)]
    made.prepare()
    return made


def test_trainers_and_replicas_are_called_at_once_and_once_each(sync: WeightSync, events: list[Any]) -> None:
    assert (sync.num_buckets, sync.summary) == (2, "two buckets")
    for number, version in ((1, 7), (2, 8)):
        events.clear()
        timings = sync.run(version)
        calls = [("replicas", number, ["s0", "s1", "s2", "s3"], version, 90.0)]
        assert events == calls + [(rank, number, version, 90.0) for rank in range(4)]
        assert timings.keys() == {"timing_s/sync_move", "timing_s/sync_verify"}
        assert min(timings.values()) >= 0


def test_colocated_each_trainer_receives_for_the_engine_rank_on_its_gpu(sync: WeightSync) -> None:
    (terms,) = sync.group.terms  # type: ignore[attr-defined]
    assert (terms.hosts, terms.target_places, terms.generations) == ((0, 1, 2, 3), terms.source_places, {})
    assert terms.store == ("127.0.0.1", "port at 127.0.0.1")
    assert list(terms.names) == [f"SGLang tensor rank {r} of replica {p}" for p in range(2) for r in range(2)]


SPLIT = replace(CONFIG, rollout=replace(CONFIG.rollout, num_gpus=4))


@pytest.fixture
def split(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> WeightSync:
    """The engine has GPUs of its own."""
    monkeypatch.setattr(driver_sync, "gather", lambda refs, callees, stage, deadline: refs)
    group = Group(events)
    made = WeightSync(SPLIT, group, Rollout(events), SHAPE, Receivers(events))  # type: ignore[arg-type]
    group.sent = [SyncReport(sums(made._source, r, zeros(made._source, r)), {}, 0.0) for r in range(4)]
    made.prepare()
    return made


def test_in_split_placement_receivers_on_the_engines_gpus_take_part(split: WeightSync, events: list[Any]) -> None:
    (terms,) = split.group.terms  # type: ignore[attr-defined]
    assert terms.hosts == (4, 5, 6, 7)
    assert terms.source_places == tuple(Place(0, gpu) for gpu in range(4))
    assert terms.target_places == (Place(1, 4), Place(1, 5), Place(2, 4), Place(2, 5))
    assert terms.store == ("address", "port at address")
    assert terms.names[3] == "SGLang tensor rank 1 of replica 1 (GPU 5) on host1"
    assert split.receivers.prepared == [("actor's layout", terms)] * 4  # type: ignore[union-attr]
    split.run(7)
    assert events == [
        ("replicas", 1, ["r0", "r1", "r2", "r3"], 7, 90.0),
        *((rank, 1, 7, 90.0) for rank in range(4)),
        *((f"receiver {target}", 1, 7, 90.0) for target in range(4)),
    ]


def test_lost_replicas_get_a_new_communicator_at_the_next_prepare_and_others_stay(split: WeightSync) -> None:
    group, receivers = split.group, split.receivers
    group.lost = [{1}, set(), {1}, set()]  # type: ignore[attr-defined]
    split.prepare()
    group.lost = [set()] * 4  # type: ignore[attr-defined]
    receivers.dead = [2]  # type: ignore[union-attr]
    split.prepare()
    receivers.dead, receivers.lost = [], [set(), {0}, set(), set()]  # type: ignore[union-attr]
    split.prepare()
    assert [terms.generations for terms in group.terms] == [{}, {1: 1}, {1: 2}, {1: 2, 0: 1}]  # type: ignore[attr-defined]


def test_a_trainer_that_could_not_send_says_why(split: WeightSync) -> None:
    sent = split.group.sent  # type: ignore[attr-defined]
    sent[2] = replace(sent[2], lost={1: "the communicator of rollout replica 1 broke: it fell"})
    with pytest.raises(WorkerError, match="^weight sync: trainer rank 2 on h: the communicator .* 1 broke: it fell$"):
        split.run(1)


@pytest.mark.parametrize("dead", [True, False])
def test_hosts_of_a_dead_replica_are_told_that_nobody_comes(
    split: WeightSync, events: list[Any], monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    """On their nodes; only then are the others' parts in the sync waited for."""
    told, waited = [], []

    def gather(refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        if len(refs) > 4:
            raise WorkerError("weight sync: SGLang replica 1 failed")
        if stage == "weight sync":
            waited.extend(refs)
        return refs

    def options(**own: Any) -> Any:
        node = own["scheduling_strategy"].node_id
        return SimpleNamespace(remote=lambda *arguments: told.append((node, *arguments)))

    monkeypatch.setattr(driver_sync, "gather", gather)
    monkeypatch.setattr(driver_sync.ray, "remote", lambda **_: lambda task: SimpleNamespace(options=options))
    monkeypatch.setattr(driver_sync, "NodeAffinitySchedulingStrategy", lambda node, soft: SimpleNamespace(node_id=node))
    split.rollout.dead = {1: "killed"} if dead else {}  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="replica 1 failed"):
        split.run(7)
    assert told == ([("m1", "r2", 1, "it has died"), ("m1", "r3", 1, "it has died")] if dead else [])
    assert len(waited) == (10 if dead else 0)


def test_the_time_to_verify_is_the_longest_that_anyone_took(sync: WeightSync, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 10.0, 10.5])
    monkeypatch.setattr(driver_sync.time, "perf_counter", lambda: next(ticks))
    sync.rollout.loaded[2] = replace(sync.rollout.loaded[2], verify_seconds=3.0)  # type: ignore[attr-defined]
    assert sync.run(1) == {"timing_s/sync_move": 7.0, "timing_s/sync_verify": 3.5}


def test_a_tensor_that_did_not_arrive_is_named_and_the_version_taken_back(sync: WeightSync, events: list[Any]) -> None:
    """The engine's checksums are those of other weights in one matrix of the second replica."""
    sync.run(1)
    wrong = zeros(TARGET, 3)
    wrong["model.layers.0.mlp.down_proj.weight"][2, 1] = 1.0
    loaded = sync.rollout.loaded  # type: ignore[attr-defined]
    loaded[3] = replace(loaded[3], sums=sums(TARGET, 3, wrong))
    with pytest.raises(
        ValueError, match=r"rollout replica 1 .* 1 of \d+ tensors: model.layers.0.mlp.down_proj.weight$"
    ):
        sync.run(2)
    assert events[-1] == UNVERIFIED


def test_elements_that_differ_are_named_with_the_engine_rank(sync: WeightSync, events: list[Any]) -> None:
    found = [Difference("model.norm.weight", 3, 0, 1.5, 2.5)]
    loaded = sync.rollout.loaded  # type: ignore[attr-defined]
    loaded[2] = replace(loaded[2], differences=found, num_different=4)
    message = (
        r"SGLang tensor rank 0 of replica 1 differ from those sent in 4 parameters: "
        r"model.norm.weight\[3, 0\] is 2.5, sent was 1.5 and 3 more"
    )
    with pytest.raises(ValueError, match=message):
        sync.run(1)
    assert events[-1] == UNVERIFIED


def test_nothing_is_compared_when_verification_is_off(sync: WeightSync, events: list[Any]) -> None:
    sync.config = replace(CONFIG, sync=replace(CONFIG.sync, verify="off"))
    sync.rollout.loaded[0] = LoadReport([], [], 0, 0.0, 0.0)  # type: ignore[attr-defined]
    sync.run(1)
    assert UNVERIFIED not in events


def test_embedded_engines_are_synced_by_the_trainers_alone(events: list[Any]) -> None:
    group = Group(events)
    own = replace(CONFIG, rollout=replace(CONFIG.rollout, engine="hf", tensor=1))
    made = WeightSync(own, group, SimpleNamespace(embedded=True), SHAPE)  # type: ignore[arg-type]
    source, target = made._source, made._target

    def report(rank: int, wrong: float = 0.0) -> SyncReport:
        held = zeros(target, rank)
        held["model.norm.weight"][0] = wrong
        loaded = LoadReport(sums(target, rank, held), [], 0, 0.0, 0.0)
        return SyncReport(sums(source, rank, zeros(source, rank)), {rank: loaded}, 0.0)

    group.sent = [report(rank) for rank in range(4)]
    made.run(5)
    assert events == [(rank, 1, 5, 90.0) for rank in range(4)]
    group.sent[1] = report(1, wrong=1.0)
    with pytest.raises(ValueError, match="rollout replica 1 .*: model.norm.weight$"):
        made.run(6)
    assert events[-1] == UNVERIFIED


def test_an_engine_of_another_precision_is_refused() -> None:
    sync = WeightSync(CONFIG, SimpleNamespace(), Rollout([], "float32"), SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SGLang replica 0, tensor rank 0: parameter .* is float32, but .* bfloat16"):
        sync.prepare()


def test_a_parameter_that_the_engine_lacks_is_named() -> None:
    sync = WeightSync(CONFIG, SimpleNamespace(), Rollout([], missing="model.norm.weight"), SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"replica 0, tensor rank 0: parameter model.norm.weight is missing"):
        sync.prepare()


# ------------------------------------------------------------------------------------------------ whose error is shown


@dataclass(frozen=True)
class Call:
    """The reference of a call that fails after so many seconds."""

    error: str
    after: float


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (Call("CUDA out of memory", 1.5), "trainer: CUDA out of memory"),
        (Call("CUDA out of memory", PATIENCE + 1), "replica: the trainer went away"),
        (Call("the loader went away", 0.5), "replica: the trainer went away"),
        (Call("gloo: Connection closed by peer", 0.5), "replica: the trainer went away"),
    ],
)
def test_that_the_other_side_went_away_is_shown_only_without_a_better_reason(
    monkeypatch: pytest.MonkeyPatch, other: Call, shown: str
) -> None:
    def gather(refs: list[Call], callees: list[Callee], stage: str, deadline: float) -> None:
        first = min(refs, key=lambda ref: ref.after)
        raise WorkerError(f"{stage}: {callees[refs.index(first)].name}: {first.error}")

    def wait(refs: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        done = sorted((ref for ref in refs if ref.after <= timeout), key=lambda ref: ref.after)[:num_returns]
        return done, [ref for ref in refs if ref not in done]

    monkeypatch.setattr(driver_sync, "gather", gather)
    monkeypatch.setattr(driver_sync.ray, "wait", wait)
    calls = [(other, Callee("trainer", "h")), (Call("the trainer went away", 0.1), Callee("replica", "h"))]
    with pytest.raises(WorkerError, match=f"^weight sync: {shown}$"):
        gather_both(calls, "weight sync", 30.0)
