"""Communicators of replicas: who is in one, and that one which breaks leaves the others alone. Real processes over
gloo: two trainers, and a receiver for each of two replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl import config
from megarl.reshard.communicator import Communicators, Membership, memberships
from megarl.reshard.executor import Executor, Message
from megarl.reshard.layout import Layout, Piece, Rect, Shard
from megarl.reshard.plan import Place, plan
from megarl.workers.weights import SyncMember, SyncTerms
from tests.processes import Party, inject, parties

CPU = torch.device("cpu")
DEADLINE = 20.0
CONFIG = config.build(
    {
        "model": {"create": {}, "precision": "fp32"},
        "data": {"create": {}},
        "run": {"deadline": DEADLINE},
        "sync": {"bucket_mb": 1},
    }
)
TENSORS = dict.fromkeys("abcdef", (300, 400))
"""Half a bucket each."""
SOURCE_PLACES = (Place(0, 0), Place(0, 1))


def source_layout() -> Layout:
    """The first rank has a, b and c, the second d, e and f."""
    return Layout("trainers", TENSORS, (whole("abc"), whole("def")), (0, 1))


def target_layout(num_replicas: int = 2) -> Layout:
    """Each replica is one rank, which has all."""
    ranks = tuple(range(num_replicas))
    return Layout("engine", TENSORS, (whole("abcdef"),), (0,) * num_replicas, ranks)


def whole(names: str) -> Shard:
    return Shard({name: TENSORS[name] for name in names}, tuple(Piece(n, Rect(0, 300, 0, 400), n, 0, 0) for n in names))


def terms(port: int | None = None, generations: Mapping[int, int] | None = None) -> SyncTerms:
    """Processes 2 and 3 receive, on GPUs of their own."""
    store = None if port is None else ("127.0.0.1", port)
    places = (Place(0, 2), Place(0, 3))
    return SyncTerms(target_layout(), (2, 3), ("rank 0", "rank 1"), SOURCE_PLACES, places, store, generations or {})


def test_members_are_those_who_send_to_a_replica_and_receive_for_it() -> None:
    """Four trainers: 0 and 2 have the first half of the tensors, 1 and 3 the second. Each gets a replica of its own."""
    source = Layout("trainers", TENSORS, (whole("abc"), whole("def")), (0, 1, 0, 1))
    own = [Place(0, 4), Place(0, 5)]
    made = plan(source, target_layout(), 4, target_places=own)
    assert memberships(made, (4, 5), {1: 3}) == {0: Membership((0, 1, 4)), 1: Membership((2, 3, 5), 3)}
    # On nodes of their own, each replica takes from the trainers of its node only.
    nodes = [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)]
    made = plan(source, target_layout(), 4, nodes, [Place(1, 2), Place(0, 2)])
    assert memberships(made, (4, 5), {}) == {0: Membership((2, 3, 4)), 1: Membership((0, 1, 5))}


def test_colocated_replicas_need_one_only_for_what_lies_in_other_processes() -> None:
    made = plan(source_layout(), target_layout(), 4)
    assert memberships(made, (0, 1), {}) == {0: Membership((0, 1)), 1: Membership((0, 1))}
    alone = Layout("one trainer", TENSORS, (whole("abcdef"),), (0,))
    assert memberships(plan(alone, target_layout(1), 4), (0,), {}) == {}


# ------------------------------------------------------------------------------------------------ processes

NUM_BUCKETS = 3


class Process:
    """A trainer or a receiver, which writes what arrives into parameters of its own."""

    def __init__(self, rank: int, fault: Any = None, device: torch.device = CPU) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.rank, self.device, self.member = rank, device, SyncMember(CONFIG, rank, device)
        self.parameters: dict[str, torch.Tensor] = {}
        if fault is not None:
            inject(Executor, "exchange", *fault)

    def open_store(self) -> int:
        return self.member.open_store("127.0.0.1")

    def prepare(self, port: int, generations: Mapping[int, int]) -> int:
        return self.member.prepare(source_layout(), terms(port, generations), is_embedded=True).num_buckets

    def sync(self, number: int, scale: float, deadline: float) -> dict[int, str]:
        """What was lost."""
        layout = self.member.sender._plan.source
        own = layout.shard(self.rank).parameters if self.rank < layout.num_ranks else {}
        source = {name: weights(name, scale).to(self.device) for name in own}
        self.parameters = {n: torch.zeros(s, device=self.device) for n, s in TENSORS.items()} if not own else {}
        return self.member.sender.sync(number, source, self.parameters, "checksum", deadline).lost

    def has(self, scale: float) -> bool:
        return all(torch.equal(self.parameters[name].cpu(), weights(name, scale)) for name in TENSORS)

    def communicators(self) -> dict[int, int]:
        """By replica, which object it is."""
        return {replica: id(made) for replica, made in self.member._communicators._backends.items()}

    def lost(self) -> set[int]:
        return self.member.lost()


def weights(name: str, scale: float) -> torch.Tensor:
    rows, columns = TENSORS[name]
    return scale * ord(name) + torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


class Processes:
    def __init__(self, faults: Mapping[int, Any], made: list[Party] | None = None) -> None:
        self.parties = made or [Party(Process, rank, faults.get(rank)) for rank in range(4)]
        self.port = self.parties[0].call("open_store")
        self.number = 0

    def all(self, method: str, *arguments: Any, leave_out: int | None = None) -> list[Any]:
        called = [party for rank, party in enumerate(self.parties) if rank != leave_out]
        for party in called:
            party.start(method, *arguments)
        return [party.result() for party in called]

    def prepare(self, generations: Mapping[int, int] | None = None) -> None:
        assert self.all("prepare", self.port, generations or {}) == [NUM_BUCKETS] * 4

    def sync(self, scale: float, deadline: float = DEADLINE, leave_out: int | None = None) -> list[Any]:
        self.number += 1
        return self.all("sync", self.number, scale, deadline, leave_out=leave_out)

    def arrived(self, scale: float) -> list[Any]:
        return [self.parties[rank].call("has", scale) for rank in (2, 3)]


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    made = Processes(getattr(request, "param", {}))
    with parties(*made.parties):
        made.prepare()
        yield made


def test_weights_reach_both_replicas_and_communicators_outlive_a_new_plan(processes: Processes) -> None:
    for scale in (1.0, 2.0):
        assert processes.sync(scale) == [{}] * 4
        assert processes.arrived(scale) == [True, True]
    before = processes.all("communicators")
    assert [sorted(one) for one in before] == [[0, 1], [0, 1], [0], [1]]
    processes.prepare()
    assert processes.sync(3.0) == [{}] * 4
    assert processes.arrived(3.0) == [True, True]
    assert processes.all("communicators") == before


@pytest.mark.parametrize("processes", [{2: (1, "die")}], indirect=True)
def test_a_receiver_that_dies_loses_its_replica_and_the_other_syncs_on(processes: Processes) -> None:
    start = time.monotonic()
    first, second, died, other = processes.sync(1.0)
    assert time.monotonic() - start < DEADLINE / 2
    assert died == "dead"
    assert other == {}
    for trainer in (first, second):
        assert list(trainer) == [0]
        assert "the communicator of rollout replica 0 broke: " in trainer[0]
    assert processes.parties[3].call("has", 1.0)
    kept = processes.all("communicators", leave_out=2)
    assert [sorted(one) for one in kept] == [[1], [1], [1]]
    assert processes.all("lost", leave_out=2) == [{0}, {0}, set()]

    # Until it is made anew, it is left out at once.
    processes.sync(2.0, leave_out=2)
    assert processes.parties[3].call("has", 2.0)

    # Another receiver in its place; only its replica's communicator is made anew.
    processes.parties[2] = Party(Process, 2)
    with parties(processes.parties[2]):
        processes.prepare({0: 1})
        for scale in (3.0, 4.0):
            assert processes.sync(scale) == [{}] * 4
            assert processes.arrived(scale) == [True, True]
        now = processes.all("communicators")
        assert [now[rank][1] for rank in (0, 1, 3)] == [one[1] for one in kept]


@pytest.mark.parametrize("processes", [{1: (1, "die")}], indirect=True)
def test_a_receiver_whose_sender_dies_takes_nothing_more_for_what_was_sent(processes: Processes) -> None:
    _, died, *receivers = processes.sync(1.0)  # the other trainer may have sent all before it sees the end of one
    assert died == "dead"
    for replica, receiver in enumerate(receivers):
        assert str(receiver).startswith(f"PeerLost: the communicator of rollout replica {replica} broke: ")
    assert processes.all("lost", leave_out=1)[1:] == [{0}, {1}]


def test_a_receiver_that_does_not_come_is_named_and_the_other_replica_has_time_left(processes: Processes) -> None:
    first, second, other = processes.sync(1.0, deadline=3.0, leave_out=2)
    assert other == {}
    said = "the communicator of rollout replica 0 broke: process 2 did not come in time (run.deadline)"
    assert (first, second) == ({0: said}, {0: said})
    assert processes.parties[3].call("has", 1.0)


class OnGpu(Process):
    """Of one trainer and one receiver, each on a GPU of its own."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank)
        super().__init__(rank, device=torch.device("cuda", rank))

    def prepare(self, port: int, generations: Mapping[int, int]) -> int:
        source = Layout("one trainer", TENSORS, (whole("abcdef"),), (0,))
        store = ("127.0.0.1", port)
        own = SyncTerms(target_layout(1), (1,), ("rank 0",), (Place(0, 0),), (Place(0, 1),), store, generations)
        return self.member.prepare(source, own, is_embedded=True).num_buckets


@pytest.mark.multi_gpu
def test_over_nccl_a_receiver_that_dies_is_given_up_at_the_deadline_and_another_takes_its_place() -> None:
    made = Processes({}, [Party(OnGpu, rank, start="spawn") for rank in range(2)])
    with parties(*made.parties):
        made.all("prepare", made.port, {})
        for scale in (1.0, 2.0):
            assert made.sync(scale) == [{}] * 2
            assert made.parties[1].call("has", scale)
        made.parties[1].process.kill()
        made.parties[1].process.join()
        start = time.monotonic()
        (lost,) = made.sync(3.0, deadline=3.0, leave_out=1)
        assert list(lost) == [0]
        assert time.monotonic() - start < DEADLINE / 2
        made.parties[1] = Party(OnGpu, 1, start="spawn")
        with parties(made.parties[1]):
            made.all("prepare", made.port, {0: 1})
            assert made.sync(4.0) == [{}] * 2
            assert made.parties[1].call("has", 4.0)


def test_messages_under_way_are_few_over_nccl_and_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time: before the third starts, the first has ended."""
    events: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            events.append(f"end {self.name}")

    class Backend:
        supports_coalescing = False

        def __init__(self, replica: int) -> None:
            self.replica = replica

        def send(self, tensors: Any, peer: int, tag: int) -> Work:
            events.append(f"send {tag} to {peer} of {self.replica}")
            return Work(str(self.replica))

    monkeypatch.setattr("megarl.reshard.communicator.MAX_IN_FLIGHT", 2)
    monkeypatch.setattr("megarl.reshard.communicator._mark", lambda device: SimpleNamespace(query=lambda: True))
    made = Communicators(None, 0, torch.device("cuda"))
    made.assign({replica: Membership((0, 5 + replica)) for replica in range(3)}, (0, 1, 2))
    made._backends = {replica: Backend(replica) for replica in range(3)}
    made.exchange([Message(7, 2, torch.empty(0)), Message(5, 0, torch.empty(0)), Message(6, 1, torch.empty(0))], [])
    assert events == [
        "send 0 to 1 of 0", "send 1 to 1 of 1", "end 0", "send 2 to 1 of 2", "end 1", "end 2",
    ]  # fmt: skip

    # One that does not end until the deadline is aborted, and the others go on.
    aborted: list[int] = []
    Backend.abort = lambda self: aborted.append(self.replica)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "megarl.reshard.communicator._mark", lambda device: SimpleNamespace(query=lambda: events[-1] != "end 1")
    )
    made.exchange([Message(7, 2, torch.empty(0)), Message(6, 1, torch.empty(0))], [])
    assert aborted == [1]
    assert made.lost == {
        1: "the communicator of rollout replica 1 broke: its messages did not end until the deadline (run.deadline)"
    }
    events.clear()
    made.exchange([Message(7, 2, torch.empty(0)), Message(6, 1, torch.empty(0))], [])
    assert events == ["send 2 to 1 of 2", "end 2"]


def test_a_backend_finds_none_of_our_words_in_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads its number from the key "0", which may not hold anything else before the first rank has written it."""
    found = []

    class Backend:
        def __init__(self, store: Any, rank: int, *rest: Any) -> None:
            found.append(store.check([str(rank)]))

    monkeypatch.setattr(dist, "ProcessGroupGloo", Backend)
    made = Communicators(dist.HashStore(), 0, CPU)
    made.assign({0: Membership((0,))}, (0,))
    made.connect(time.monotonic() + DEADLINE)
    assert (found, made.lost) == ([False], {})
