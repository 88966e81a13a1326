"""Syncs between real processes: hosts that exchange buckets over gloo, and loaders that take them."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megarl.reshard import channel
from megarl.reshard.channel import LoadReport, Setup, Target, give_up, load_envelope, load_weights
from megarl.reshard.checksum import TensorChecksums, compare
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, Piece, Rect, Shard
from megarl.reshard.plan import ReshardPlan, plan
from megarl.reshard.transports import BucketRegion, read_reply
from megarl.workers.weights import WeightSender
from tests.processes import Party, inject, parties

CPU = torch.device("cpu")
DEADLINE = 15.0
TENSORS = {"a": (6, 4), "b": (5,), "c": (3, 2, 2)}
NAMES = ["SGLang tensor rank 0 of replica 0", "SGLang tensor rank 1 of replica 0"]


def source_layout(num_ranks: int) -> Layout:
    """One rank has all; of two, each has half the rows of a, the first also b, the second c."""
    whole = (Piece("b", Rect(0, 5, 0, 1), "b", 0, 0), Piece("c", Rect(0, 6, 0, 2), "c", 0, 0))
    if num_ranks == 1:
        return Layout("one", TENSORS, (Shard(TENSORS, (Piece("a", Rect(0, 6, 0, 4), "a", 0, 0), *whole)),), (0,))
    upper = Shard({"a": (3, 4), "b": (5,)}, (Piece("a", Rect(0, 3, 0, 4), "a", 0, 0), whole[0]))
    lower = Shard({"a": (3, 4), "c": (3, 2, 2)}, (Piece("a", Rect(3, 6, 0, 4), "a", 0, 0), whole[1]))
    return Layout("two", TENSORS, (upper, lower), (0, 1))


def target_layout() -> Layout:
    """Two tensor-parallel ranks: half the columns of a each, b and c whole. The parameter x has a at its bottom."""
    shards = []
    for rank in range(2):
        a = Piece("a", Rect(0, 6, 2 * rank, 2 * rank + 2), "x", 1, 0)
        rest = (Piece("b", Rect(0, 5, 0, 1), "b", 0, 0), Piece("c", Rect(0, 6, 0, 2), "c", 0, 0))
        shards.append(Shard({"x": (7, 2), "b": (5,), "c": (3, 2, 2)}, (a, *rest)))
    return Layout("engine", TENSORS, tuple(shards), (0, 1))


def make_plan(num_sources: int, bucket_bytes: int = 64) -> ReshardPlan:
    return plan(source_layout(num_sources), target_layout(), 4, bucket_bytes=bucket_bytes)


NUM_BUCKETS = len(make_plan(1).buckets)


def weights(scale: float) -> dict[str, torch.Tensor]:
    found = {
        name: scale * torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in TENSORS.items()
    }
    found["b"][2] = torch.nan
    return found


def source_parameters(num_sources: int, rank: int, scale: float) -> dict[str, torch.Tensor]:
    whole = weights(scale)
    if num_sources == 1:
        return whole
    if rank >= 2:
        return {}
    half = whole["a"][3 * rank : 3 * rank + 3].clone()
    return {"a": half, **({"b": whole["b"]} if rank == 0 else {"c": whole["c"]})}


def expected(rank: int, scale: float) -> dict[str, torch.Tensor]:
    whole = weights(scale)
    x = torch.cat([torch.zeros(1, 2), whole["a"][:, 2 * rank : 2 * rank + 2]])
    return {"x": x, "b": whole["b"], "c": whole["c"]}


class Model(nn.Module):
    def __init__(self, missing: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in target_layout().shard(0).parameters.items():
            if name != missing:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


# ------------------------------------------------------------------------------------------------ processes


class Host:
    """A trainer's process. fault: (bucket, what) happens after that bucket was exchanged the first time through."""

    def __init__(
        self, folder: str, rank: int, num_sources: int, hosts: Sequence[int], fault: Any = None, device: str = "cpu"
    ) -> None:
        self.rank, self.num_sources, self.hosts, self.device = rank, num_sources, hosts, torch.device(device)
        size = max(num_sources, max(hosts) + 1)
        self.group = None
        if size > 1:
            store = dist.FileStore(os.path.join(folder, "store"), size)
            self.group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=DEADLINE))
        tempfile.tempdir = folder  # where its sockets lie when it is killed
        if fault is not None:
            inject(Executor, "exchange", *fault)

    def prepare(self, bucket_bytes: int = 64) -> dict[int, str]:
        made = make_plan(self.num_sources, bucket_bytes)
        self.sender = WeightSender(made, torch.float32, self.rank, self.hosts, self.device, NAMES, self.group)
        return self.sender.sockets

    def sync(self, number: int, scale: float, verify: str, deadline: float = DEADLINE) -> Any:
        source = {n: p.to(self.device) for n, p in source_parameters(self.num_sources, self.rank, scale).items()}
        try:
            return self.sender.sync(number, source, None, verify, deadline).sums
        except Exception as error:
            self.failed = error  # kept, with all that its traceback holds
            raise


class Loader:
    """An engine rank's process."""

    def __init__(
        self, folder: str, model: Mapping[str, Any] | None = None, fault: Any = None, device: str = "cpu"
    ) -> None:
        self.model, self.reply = Model(**(model or {})).to(device), os.path.join(folder, f"reply-{os.getpid()}")
        if fault is not None:
            inject(Target, "load", *fault)

    def load(self, path: str, number: int, deadline: float = DEADLINE) -> Any:
        load_weights(self.model, [(load_envelope(self.reply, path, number, deadline), torch.empty(0))])
        return LoadReport.from_json(read_reply(self.reply)), {
            n: p.detach().cpu().numpy() for n, p in self.model.named_parameters()
        }

    def replace_parameters(self) -> None:
        """As a backend does that allocates anew: the same names elsewhere."""
        for parameter in self.model.parameters():
            parameter.data = torch.full_like(parameter.data, 5.0)
        self.model.x.data[0] = 0

    def shared_files(self) -> int:
        """Shared-memory files of torch that this process has mapped."""
        return len(set(re.findall(r"/torch_\S+", Path("/proc/self/maps").read_text())))


class Sync:
    """Hosts and loaders; target rank t is hosted by process hosts[t]."""

    def __init__(
        self,
        folder: Path,
        num_sources: int = 1,
        hosts: Sequence[int] = (0, 0),
        host_faults: Mapping[int, Any] | None = None,
        models: Mapping[int, Any] | None = None,
        loader_faults: Mapping[int, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        size = max(num_sources, max(hosts) + 1)
        faults, loader_faults, models = host_faults or {}, loader_faults or {}, models or {}
        start = "spawn" if device == "cuda" else "fork"  # CUDA cannot be used in a fork of a process that used it
        self.hosts = [
            Party(Host, str(folder), r, num_sources, hosts, faults.get(r), device, start=start) for r in range(size)
        ]
        self.loaders = [
            Party(Loader, str(folder), models.get(t), loader_faults.get(t), device, start=start) for t in range(2)
        ]
        self.num_sources = num_sources
        self.number = 0

    def prepare(self, bucket_bytes: int = 64) -> None:
        for host in self.hosts:
            host.start("prepare", bucket_bytes)
        self.sockets = {t: path for host in self.hosts for t, path in host.result().items()}

    def __call__(
        self, scale: float, verify: str = "checksum", deadline: float = DEADLINE
    ) -> tuple[list[Any], list[Any]]:
        """What the hosts and the loaders answer."""
        self.number += 1
        for t, loader in enumerate(self.loaders):
            loader.start("load", self.sockets[t], self.number, deadline)
        for host in self.hosts:
            host.start("sync", self.number, scale, verify, deadline)
        return [host.result() for host in self.hosts], [loader.result() for loader in self.loaders]

    def check(self, sent: Sequence[Any], loaded: Sequence[Any], scale: float) -> None:
        """All arrived, and both sides' checksums say so."""
        for rank, (report, parameters) in enumerate(loaded):
            for name, value in expected(rank, scale).items():
                torch.testing.assert_close(torch.from_numpy(parameters[name]), value, rtol=0, atol=0, equal_nan=True)
            assert (report.num_different, report.differences) == (0, [])
        self.compare_sums(sent, loaded)

    def compare_sums(self, sent: Sequence[Any], loaded: Sequence[Any]) -> None:
        source = TensorChecksums(source_layout(self.num_sources), range(self.num_sources))
        target = TensorChecksums(target_layout(), range(2))
        compare(
            source.of(dict(enumerate(sent[: self.num_sources]))),
            target.of({rank: report.sums for rank, (report, _) in enumerate(loaded)}),
            "replica 0",
        )


@contextlib.contextmanager
def syncing(folder: Path, *arguments: Any, **options: Any) -> Iterator[Sync]:
    sync = Sync(folder, *arguments, **options)
    with parties(*sync.hosts, *sync.loaders):
        sync.prepare()
        yield sync


# ------------------------------------------------------------------------------------------------ what arrives


@pytest.mark.parametrize(
    ("num_sources", "hosts"),
    [(1, (0, 0)), (2, (0, 1)), (2, (2, 2)), (2, (3, 2))],
    ids=["one process", "each hosts one", "a receiver hosts both", "a receiver each"],
)
def test_weights_arrive_again_and_again_and_are_verified(
    tmp_path: Path, num_sources: int, hosts: tuple[int, int]
) -> None:
    with syncing(tmp_path, num_sources, hosts) as sync:
        for scale, verify in ((1.0, "checksum"), (-2.0, "bitwise"), (3.0, "checksum")):
            sent, loaded = sync(scale, verify)
            sync.check(sent, loaded, scale)
        sent, loaded = sync(4.0, "off")
        assert [report.sums for report, _ in loaded] == [[], []]
        assert all(sums == [] for sums in sent)
        assert loaded[1][1]["c"].tolist() == expected(1, 4.0)["c"].tolist()


@pytest.mark.gpu
def test_weights_arrive_through_a_gpu(tmp_path: Path) -> None:
    with syncing(tmp_path, device="cuda") as sync:
        for bucket_bytes in (64, 100):
            sync.prepare(bucket_bytes)
            for scale, verify in ((1.0, "checksum"), (-2.0, "bitwise"), (3.0, "checksum")):
                sync.check(*sync(scale, verify), scale)
        sync.loaders[0].call("replace_parameters")
        sync.check(*sync(2.0, "bitwise"), 2.0)


def test_a_plan_of_one_bucket_has_one_buffer(tmp_path: Path) -> None:
    with syncing(tmp_path) as sync:
        sync.prepare(1 << 20)
        for scale in (1.0, 2.0):
            sync.check(*sync(scale, "bitwise"), scale)
        assert sync.loaders[0].call("shared_files") == 1


def test_parameters_that_moved_are_found(tmp_path: Path) -> None:
    with syncing(tmp_path) as sync:
        sync.check(*sync(1.0), 1.0)
        sync.loaders[0].call("replace_parameters")
        sync.check(*sync(2.0, "bitwise"), 2.0)


def test_a_new_setup_takes_the_place_of_the_one_that_a_loader_knows(tmp_path: Path) -> None:
    """Other buckets in other buffers; the handles of the old ones are given back."""
    assert NUM_BUCKETS > 4
    with syncing(tmp_path) as sync:
        for bucket_bytes in (64, 100, 64):
            sync.prepare(bucket_bytes)
            for scale in (1.0, 2.0):
                sync.check(*sync(scale), scale)
            assert sync.loaders[0].call("shared_files") == 2


def test_a_buffer_is_filled_again_only_when_its_bucket_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be two buckets ahead of the loader, through the end of a pass with an odd number of them."""
    events: list[str] = []

    class Buffers:
        setup = Setup("k", "float32", ((),) * 3, ())
        buffers = (torch.zeros(1), torch.zeros(1))
        name = "rank"

        def accept(self, sync: int, until: float) -> Any:
            return Loaders(), {"key": "k"}

    class Loaders:
        at = ""
        taken = 0

        def send(self, **message: Any) -> None:
            events.extend(f"filled {step}" for step in [message.get("filled")] if step is not None)

        def receive(self) -> dict[str, int]:
            self.taken += 1
            events.append(f"drained {self.taken - 1}")
            return {"drained": self.taken - 1}

        def close(self) -> None: ...

    delivery = channel.ChannelDelivery(Buffers(), 1, "bitwise", 0.0)  # type: ignore[arg-type]
    for comparing in (False, True):
        for bucket in range(3):
            delivery.buffer(bucket)
            delivery.filled(bucket, comparing)
    delivery.finish()
    assert delivery.failure is None
    assert events == [
        "filled 0", "filled 1", "drained 0", "filled 2",
        # Buckets 2 and 0 lie in the same buffer.
        "drained 1", "drained 2", "filled 3", "filled 4", "drained 3", "filled 5", "drained 4", "drained 5",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is wrong


def test_a_corrupted_bucket_is_named_by_its_tensor_and_by_its_element(tmp_path: Path) -> None:
    at = next(
        b for b, bucket in enumerate(make_plan(1).buckets) if [c for c in bucket if c.target_rank == 0][0].tensor == "a"
    )
    with syncing(tmp_path, host_faults={0: (at, "corrupt")}) as sync:
        sent, loaded = sync(1.0, "bitwise")
        with pytest.raises(ValueError, match="in 1 of 3 tensors: a$"):
            sync.compare_sums(sent, loaded)
        report, parameters = loaded[0]
        (difference,) = report.differences
        row, column = difference.row, difference.column
        assert (report.num_different, difference.parameter) == (1, "x")
        assert difference.found == parameters["x"][row, column] != expected(0, 1.0)["x"][row, column]
        assert difference.sent == expected(0, 1.0)["x"][row, column]
        assert str(difference).startswith(f"x[{row}, {column}] is ")
        assert loaded[1][0].num_different == 0
        sync.check(*sync(2.0, "bitwise"), 2.0)


def test_the_first_elements_of_many_parameters_that_differ_are_counted() -> None:
    names = [f"p{i:02}" for i in range(30)]
    regions = tuple(BucketRegion(name, "bfloat16", (1, 3), (0, 2), 8 * i) for i, name in enumerate(names))
    target = Target(Setup("", "bfloat16", (regions,), ()), [torch.zeros(240, dtype=torch.uint8)])
    parameters = {name: torch.zeros(4, 2, dtype=torch.bfloat16) for name in names}
    for name in names[5:]:
        parameters[name][2:, 1] = -0.0  # other bits, though equal as numbers; the last row is not compared
    target.attach(parameters)
    target.compare(0)
    report = LoadReport.from_json(target.report([]).to_json())
    assert report.num_different == 25
    assert [d.parameter for d in report.differences] == names[5:25]
    assert {(d.row, d.column) for d in report.differences} == {(2, 1)}
    target.attach(parameters)
    assert target.report([]).num_different == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"missing": "b"}, "b: the engine has no such parameter"),
        ({"dtype": torch.bfloat16}, "is bfloat16 here, but the bucket brings float32"),
    ],
)
def test_a_loaders_error_reaches_both_sides_and_the_others_go_on(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    with syncing(tmp_path, 2, (0, 1), models={1: model}) as sync:
        sent, loaded = sync(1.0)
        assert re.search(rf"^RuntimeError: SGLang tensor rank 1 of replica 0: .*{message}", str(sent[1]))
        assert re.search(rf"^RuntimeError: .*{message}", str(loaded[1]))
        assert isinstance(sent[0], list)
        torch.testing.assert_close(torch.from_numpy(loaded[0][1]["c"]), weights(1.0)["c"])


def test_a_loader_that_dies_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with syncing(tmp_path, 2, (0, 1), loader_faults={1: (2, "die")}) as sync:
        start = time.monotonic()
        sent, loaded = sync(1.0)
        assert time.monotonic() - start < DEADLINE / 2
        assert loaded[1] == "dead"
        num_buckets = len(make_plan(2).buckets)
        assert str(sent[1]) == f"PeerLost: SGLang tensor rank 1 of replica 0 went away in bucket 3 of {num_buckets}"
        assert isinstance(sent[0], list)
        torch.testing.assert_close(torch.from_numpy(loaded[0][1]["c"]), weights(1.0)["c"])
        # A new engine process in its place, which knows no setup.
        sync.loaders[1].process.join()
        sync.loaders[1] = Party(Loader, str(tmp_path))
        with parties(sync.loaders[1]):
            sync.check(*sync(2.0), 2.0)


def test_a_trainer_that_dies_is_named_and_the_loader_lives(tmp_path: Path) -> None:
    with syncing(tmp_path, host_faults={0: (2, "die")}) as sync:
        start = time.monotonic()
        sent, loaded = sync(1.0)
        assert time.monotonic() - start < DEADLINE / 2
        assert sent == ["dead"]
        # In the bucket that did not come, or when it said that it had taken one before.
        assert re.fullmatch(rf"RuntimeError: the trainer went away in bucket [123] of {NUM_BUCKETS}", str(loaded[0]))
        again = sync.loaders[0].call("load", sync.sockets[0], 2)
        assert "the trainer went away before the sync: nobody listens at " in str(again)
        # Another trainer in its place.
        sync.hosts[0] = Party(Host, str(tmp_path), 0, 1, (0, 0))
        with parties(sync.hosts[0]):
            sync.prepare()
            sync.check(*sync(2.0), 2.0)


def test_an_exchange_that_fails_is_the_trainers_error_and_the_next_sync_works(tmp_path: Path) -> None:
    with syncing(tmp_path, host_faults={0: (1, "fail")}) as sync:
        sent, loaded = sync(1.0)
        assert str(sent[0]) == "ZeroDivisionError: it broke"
        # In the bucket that did not come, or when it said that it had taken the one before.
        assert re.fullmatch(rf"RuntimeError: the trainer went away in bucket [12] of {NUM_BUCKETS}", str(loaded[0]))
        sync.check(*sync(2.0), 2.0)


@pytest.mark.parametrize("side", ["host_faults", "loader_faults"])
def test_a_side_that_hangs_is_named_at_the_deadline(tmp_path: Path, side: str) -> None:
    with syncing(tmp_path, **{side: {0: (2, "hang")}}) as sync:
        for t, loader in enumerate(sync.loaders):
            loader.start("load", sync.sockets[t], 1, 1.0)
        sync.hosts[0].start("sync", 1, 1.0, "checksum", 1.0)
        late = sync.hosts[0] if side == "loader_faults" else sync.loaders[0]
        who = NAMES[0] if side == "loader_faults" else "the trainer"
        message = rf"{who} did not answer until the deadline \(run.deadline\) in bucket 3 of {NUM_BUCKETS}"
        assert re.search(message, str(late.result()))


def test_nobody_waits_for_ever_for_the_other_to_begin(tmp_path: Path) -> None:
    with syncing(tmp_path) as sync:
        alone = sync.hosts[0].call("sync", 1, 1.0, "checksum", 0.3)
        assert "SGLang tensor rank 0 of replica 0 did not ask for weights until the deadline" in str(alone)
        alone = sync.loaders[0].call("load", sync.sockets[0], 1, 0.3)
        assert "the trainer did not answer until the deadline" in str(alone)
        sync.number = 1
        sync.check(*sync(2.0), 2.0)  # the connection of the loader that gave up is in the queue still


def test_a_loader_of_an_earlier_sync_is_refused(tmp_path: Path) -> None:
    with syncing(tmp_path) as sync:
        sync.number = 3
        sync.check(*sync(1.0), 1.0)
        stale = Party(Loader, str(tmp_path))
        with parties(stale):
            stale.start("load", sync.sockets[0], 3)
            time.sleep(0.2)
            sync.check(*sync(2.0), 2.0)
            assert str(stale.result()) == "RuntimeError: the trainer refused: this is sync 5, not 3"


def test_a_host_that_waits_in_vain_gives_up_when_the_next_sync_begins(tmp_path: Path) -> None:
    with syncing(tmp_path) as sync:
        sync.hosts[0].start("sync", 1, 1.0, "checksum")
        for t, loader in enumerate(sync.loaders):
            loader.start("load", sync.sockets[t], 2)
        given_up = str(sync.hosts[0].result())
        assert "SGLang tensor rank 0 of replica 0 has given up sync 1: it asks for sync 2" in given_up
        sent = [sync.hosts[0].call("sync", 2, 2.0, "checksum")]
        sync.check(sent, [loader.result() for loader in sync.loaders], 2.0)


def test_an_embedded_engine_is_filled_in_place_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(source_layout(1), source_layout(1), 4, bucket_bytes=64)
    sender = WeightSender(made, torch.float32, 0, (0,), CPU, None)
    own = {name: torch.zeros(shape) for name, shape in TENSORS.items()}
    for number, verify in enumerate(("off", "checksum", "bitwise")):
        source = source_parameters(1, 0, 1.0 + number)
        report = sender.sync(number, source, own, verify, DEADLINE)
        for name, value in source.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=0, equal_nan=True)
        assert report.loaded[0].sums == report.sums
        assert len(report.sums) == (0 if verify == "off" else 3)
        assert report.loaded[0].num_different == 0
    real = Target.load
    monkeypatch.setattr(Target, "load", lambda self, bucket: real(self, bucket) if bucket else None)
    report = sender.sync(9, source_parameters(1, 0, 7.0), own, "bitwise", DEADLINE)
    first = made.buckets[0][0].target_parameter
    assert first in [difference.parameter for difference in report.loaded[0].differences]
    assert report.loaded[0].sums != report.sums


def test_a_host_does_not_wait_for_a_loader_of_which_it_hears_that_it_will_not_come(tmp_path: Path) -> None:
    with syncing(tmp_path, 2, (0, 1)) as sync:
        start = time.monotonic()
        sync.loaders[0].start("load", sync.sockets[0], 1)
        for host in sync.hosts:
            host.start("sync", 1, 1.0, "checksum")
        give_up(sync.sockets[1], 1, "SGLang has died")
        assert str(sync.hosts[1].result()) == "RuntimeError: SGLang tensor rank 1 of replica 0: SGLang has died"
        assert isinstance(sync.hosts[0].result(), list)
        assert sync.loaders[0].result()[0].num_different == 0
        assert time.monotonic() - start < DEADLINE / 2
        give_up(sync.sockets[0], 1, "said when the sync was over")
        sync.number = 1
        sync.check(*sync(2.0), 2.0)


def test_only_this_user_reaches_the_socket(tmp_path: Path) -> None:
    sender = WeightSender(make_plan(1), torch.float32, 0, (0, 0), CPU, NAMES)
    folder = os.path.dirname(sender.sockets[0])
    assert os.stat(folder).st_mode & 0o777 == 0o700
    sender.close()
    assert not os.path.exists(folder)
