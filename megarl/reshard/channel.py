"""One weight sync between the process that hosts an engine rank and that rank's loader, bucket by bucket.

The host (the trainer on the same GPU) owns a `Channel`: two flat bucket buffers and a socket. Once a sync, SGLang calls
`load_weights` in each tensor-parallel rank's scheduler process, which connects to it and goes through the buckets:

    loader                               host
    hello: sync 7, key of its setup  ->
                                     <-  terms: verify mode, and the setup (regions, handles) where the key is another
                                     <-  filled 0
    copies bucket 0; drained 0       ->  meanwhile exchanges bucket 1 into the other buffer
                                     <-  filled 1
    ...                                  waits for drained b - 2 before it overwrites a buffer
    sums its own parameters              sums its own

With verify=bitwise the buckets come a second time, and the loader compares instead of copying. The weights themselves
stay in the buffers: messages are a length and JSON. Every wait has a deadline, and a side that ends is seen at once by
the other as the end of the stream.

Imported by SGLang's scheduler processes: torch and the standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megarl.reshard.checksum import bits
from megarl.reshard.regions import RegionCopies, RegionSums
from megarl.reshard.transports import (
    BucketRegion,
    ChecksumRegion,
    allocate_shareable,
    answer,
    open_shared,
    parameter_region,
    reason,
    region_views,
    share,
    torch_dtype,
)

if TYPE_CHECKING:
    from megarl.reshard.executor import Executor

OFF, CHECKSUM, BITWISE = "off", "checksum", "bitwise"

MAX_NAMED = 20
"""Parameters that a bitwise comparison names; the others are counted."""

WENT_AWAY = "went away"

UNVERIFIED = -1
"""The version of an engine whose weights are not known to be the trainer's."""


class PeerLost(RuntimeError):
    """The other side of a channel ended, or closed it."""


# ------------------------------------------------------------------------------------------------ what is agreed


@dataclass(frozen=True)
class Setup:
    """What does not change from sync to sync: where each bucket's regions go, and what is summed."""

    key: str
    dtype: str
    buckets: tuple[tuple[BucketRegion, ...], ...]
    checksums: tuple[ChecksumRegion, ...]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that occur."""
        regions = [region.parameter for bucket in self.buckets for region in bucket]
        return tuple(dict.fromkeys(regions + [region.parameter for region in self.checksums]))

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "dtype": self.dtype,
            "buckets": [
                [[r.parameter, r.dtype, r.rows, r.columns, r.offset] for r in bucket] for bucket in self.buckets
            ],
            "checksums": [list(asdict(region).values()) for region in self.checksums],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Setup:
        buckets = tuple(
            tuple(BucketRegion(name, dtype, tuple(rows), tuple(cols), at) for name, dtype, rows, cols, at in bucket)
            for bucket in found["buckets"]
        )
        checksums = tuple(ChecksumRegion(n, tuple(rows), tuple(cols), *at) for n, rows, cols, *at in found["checksums"])
        return cls(found["key"], found["dtype"], buckets, checksums)


@dataclass(frozen=True)
class Difference:
    """The first element of a parameter, seen as rows x columns, that is not what the trainer sent."""

    parameter: str
    row: int
    column: int
    sent: float
    found: float

    def __str__(self) -> str:
        return f"{self.parameter}[{self.row}, {self.column}] is {self.found!r}, sent was {self.sent!r}"


@dataclass(frozen=True)
class LoadReport:
    """What an engine rank says of a sync."""

    sums: list[int]
    """Checksums of its own parameters by the setup's regions; empty with verify=off."""
    differences: list[Difference]
    """At most MAX_NAMED; with verify=bitwise only."""
    num_different: int
    """Parameters that differ."""
    move_seconds: float
    """Until the last bucket was in."""
    verify_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> LoadReport:
        return cls(**{**found, "differences": [Difference(**one) for one in found["differences"]]})


class Target:
    """An engine rank's own parameters and the buckets that fill them: what to copy, to compare and to sum."""

    def __init__(self, setup: Setup, buffers: Sequence[Tensor]) -> None:
        """
        Args:
            buffers: bucket b lies in buffers[b % len(buffers)].
        """
        self.setup, self.buffers = setup, list(buffers)
        self._addresses: dict[str, int] = {}
        self._parameters: Mapping[str, Tensor] = {}
        self._copies: list[RegionCopies] = []
        self._sums: RegionSums | None = None
        self._differences: dict[str, Difference] = {}

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin a sync into these parameters. Copies are prepared anew only if one of them has moved.

        Raises:
            ValueError: names the parameter that is missing, too small, of another type, or not stored row by row.
        """
        self._differences = {}
        addresses = {n: parameters[n].data_ptr() for n in self.setup.parameters if n in parameters}
        if self._copies and addresses == self._addresses:
            return
        self._parameters, self._sums = parameters, None
        self._copies = [RegionCopies(*self._views(bucket)) for bucket in range(len(self.setup.buckets))]
        self._addresses = addresses

    def load(self, bucket: int) -> None:
        """Copy a bucket into the parameters, and wait until it is there."""
        self._copies[bucket].run()
        wait_for_device(self.buffers[0].device)

    def compare(self, bucket: int) -> None:
        """Note where the parameters are not, bit for bit, what the bucket holds."""
        targets, sources = self._views(bucket)
        if not targets:
            return
        counts = torch.stack([(bits(t) != bits(s)).sum() for t, s in zip(targets, sources, strict=True)]).tolist()
        for region, target, sent, count in zip(self.setup.buckets[bucket], targets, sources, counts, strict=True):
            if count and region.parameter not in self._differences:
                row, column = (bits(target) != bits(sent)).nonzero()[0].tolist()
                place = (region.rows[0] + row, region.columns[0] + column)
                values = (float(sent[row, column]), float(target[row, column]))
                self._differences[region.parameter] = Difference(region.parameter, *place, *values)

    def sums(self) -> list[int]:
        """The checksums of the setup's regions, read from the parameters."""
        if self._sums is None:
            regions = [
                (
                    parameter_region(self._parameters, r.parameter, r.rows, r.columns),
                    r.canonical_row,
                    r.canonical_column,
                    r.canonical_columns,
                )
                for r in self.setup.checksums
            ]
            self._sums = RegionSums(regions, torch_dtype(self.setup.dtype))
        return self._sums.run()

    def report(self, sums: list[int], move_seconds: float = 0.0, verify_seconds: float = 0.0) -> LoadReport:
        named = list(self._differences.values())[:MAX_NAMED]
        return LoadReport(sums, named, len(self._differences), move_seconds, verify_seconds)

    def _views(self, bucket: int) -> tuple[list[Tensor], list[Tensor]]:
        flat = self.buffers[bucket % len(self.buffers)]
        return region_views(self._parameters, self.setup.buckets[bucket], flat)


def wait_for_device(device: torch.device) -> None:
    """Wait until all that was enqueued on the current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def passes(verify: str) -> tuple[bool, ...]:
    """How often the buckets come, and whether they are compared then. passes("bitwise") == (False, True)"""
    return (False, True) if verify == BITWISE else (False,)


def where(step: int, num_buckets: int) -> str:
    """where(2, 7) == "in bucket 3 of 7"; the second time through: where(9, 7) == "in bucket 3 of 7 (comparing)" """
    return f"in bucket {step % num_buckets + 1} of {num_buckets}" + (" (comparing)" if step >= num_buckets else "")


# ------------------------------------------------------------------------------------------------ messages


_LENGTH = struct.Struct("!I")


class Connection:
    """Messages to and from the other side until a deadline. A message is a dict, on the wire its length and JSON."""

    def __init__(self, sock: socket.socket, peer: str, until: float) -> None:
        """
        Args:
            peer: whom errors name.
            until: the deadline, as time.monotonic counts.
        """
        self._socket, self.peer, self.until = sock, peer, until
        self.at = ""
        """Where in the sync this side is, for errors: "in bucket 3 of 7"."""

    def send(self, **message: Any) -> None:
        """
        Raises:
            PeerLost: the other side has gone.
        """
        data = json.dumps(message).encode()
        self._wait_at_most()
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise self._lost() from None

    def receive(self) -> dict[str, Any]:
        """
        Raises:
            PeerLost: the other side has gone.
            RuntimeError: no message came until the deadline.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: dict[str, Any] = json.loads(self._read(length))
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_at_most()
            try:
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                raise self._late() from None
            except OSError:
                part = b""
            if not part:
                raise self._lost()
            data += part
        return bytes(data)

    def _wait_at_most(self) -> None:
        self._socket.settimeout(max(self.until - time.monotonic(), 0.001))

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self.peer} {WENT_AWAY} {self.at}".rstrip())

    def _late(self) -> RuntimeError:
        return RuntimeError(f"{self.peer} did not answer until the deadline (run.deadline) {self.at}".rstrip())

    def close(self) -> None:
        self._socket.close()


# ------------------------------------------------------------------------------------------------ the host


class Channel:
    """An engine rank's bucket buffers, and the socket at which its loader asks for them."""

    def __init__(
        self,
        name: str,
        dtype: str,
        buckets: Sequence[Sequence[BucketRegion]],
        checksums: Sequence[ChecksumRegion],
        num_bytes: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            name: of the engine rank, for errors: "SGLang tensor rank 1 of replica 0".
            num_bytes: of the largest bucket.
        """
        self.name = name
        self.setup = Setup(uuid.uuid4().hex, dtype, tuple(map(tuple, buckets)), tuple(checksums))
        count = min(len(buckets), 2)
        self.buffers = [allocate_shareable(max(num_bytes, 1), device) for _ in range(count)]
        folder = tempfile.mkdtemp(prefix="megarl-sync-")  # for this user only
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = os.path.join(folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.path)
        except OSError as error:
            raise ValueError(f"no socket can be made at {self.path}: {error}; set TMPDIR to a shorter path") from error
        self._listener.listen(8)
        self._early: tuple[Connection, dict[str, Any]] | None = None

    def accept(self, sync: int, until: float) -> tuple[Connection, dict[str, Any]]:
        """The loader of this sync, and its hello. Loaders of earlier ones, which gave up or are late, are refused.

        Raises:
            RuntimeError: no loader came until the deadline or will come (see `give_up`), or one of a later sync did.
        """
        while True:
            connection, hello = self._next(until)
            if hello.get("sync") == sync and "error" in hello:
                connection.close()
                raise RuntimeError(f"{self.name}: {hello['error']}")
            if hello.get("sync") == sync:
                return connection, hello
            if hello.get("sync", 0) > sync:
                self._early = (connection, hello)
                raise RuntimeError(f"{self.name} has given up sync {sync}: it asks for sync {hello['sync']}")
            with contextlib.suppress(RuntimeError):
                connection.send(error=f"this is sync {sync}, not {hello.get('sync')}")
            connection.close()

    def _next(self, until: float) -> tuple[Connection, dict[str, Any]]:
        if self._early is not None:
            (connection, hello), self._early = self._early, None
            connection.until = until
            return connection, hello
        while True:
            self._listener.settimeout(max(until - time.monotonic(), 0.001))
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError(f"{self.name} did not ask for weights until the deadline (run.deadline)") from None
            connection = Connection(accepted, self.name, until)
            with contextlib.suppress(PeerLost, ValueError):
                return connection, connection.receive()
            connection.close()

    def handles(self) -> list[str]:
        """Handles on the buffers for one loader process."""
        return [base64.b64encode(share(buffer)).decode("ascii") for buffer in self.buffers]


class Delivery(Protocol):
    """The host's part in one sync with one engine rank."""

    failure: Exception | None

    def buffer(self, bucket: int) -> Tensor:
        """Where to put a bucket; waits until what lay there has been taken."""

    def filled(self, bucket: int, comparing: bool) -> None:
        """The bucket is in its buffer."""

    def finish(self) -> None:
        """All buckets were taken, or `failure` says why not."""

    def fail(self, why: Exception) -> None:
        """What comes in the buffers from now on is not what was sent."""

    def close(self) -> None: ...


class ChannelDelivery:
    """A delivery to a loader in another process. It never raises: after its first failure it waits for nobody, so that
    the other hosts' exchanges go on."""

    def __init__(self, channel: Channel, sync: int, verify: str, until: float) -> None:
        self.failure: Exception | None = None
        self._channel = channel
        self._connection: Connection | None = None
        self._num_buckets = len(channel.setup.buckets)
        self._sent = self._drained = 0  # buckets, counted through both passes
        self._sent_until = [0] * len(channel.buffers)  # of each buffer, how many had been sent with the last in it
        with self._noting():
            self._connection, hello = channel.accept(sync, until)
            self._connection.at = where(0, self._num_buckets)
            known = hello.get("key") == channel.setup.key
            setup = {} if known else {"setup": channel.setup.to_json(), "handles": channel.handles()}
            self._connection.send(verify=verify, **setup)

    def buffer(self, bucket: int) -> Tensor:
        index = bucket % len(self._channel.buffers)
        with self._noting():
            self._wait_for(self._sent_until[index])
        return self._channel.buffers[index]

    def filled(self, bucket: int, comparing: bool) -> None:
        with self._noting():
            if self._connection is not None:
                self._connection.send(filled=self._sent)
        self._sent += 1
        self._sent_until[bucket % len(self._channel.buffers)] = self._sent

    def finish(self) -> None:
        with self._noting():
            self._wait_for(self._sent)

    def fail(self, why: Exception) -> None:
        self.failure = self.failure or why
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _wait_for(self, drained: int) -> None:
        while self._connection is not None and self._drained < drained:
            message = self._connection.receive()
            if "error" in message:
                raise RuntimeError(f"{self._channel.name}: {message['error']}")
            self._drained = message["drained"] + 1
            self._connection.at = where(self._drained, self._num_buckets)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep the first failure, with what the loader said last, and drop the connection."""
        try:
            yield
        except PeerLost as lost:
            self.failure = self._last_words() or lost
            self.close()
        except Exception as error:
            self.failure = error
            self.close()

    def _last_words(self) -> Exception | None:
        """The loader's own error, or where it was when it ended: what it sent before a message to it failed."""
        try:
            self._wait_for(self._sent + 1)
        except Exception as error:
            return error
        return None


class LocalDelivery:
    """A delivery into parameters of this process."""

    def __init__(self, target: Target, parameters: Mapping[str, Tensor]) -> None:
        self.failure: Exception | None = None
        self._target = target
        target.attach(parameters)

    def buffer(self, bucket: int) -> Tensor:
        return self._target.buffers[bucket % len(self._target.buffers)]

    def filled(self, bucket: int, comparing: bool) -> None:
        if self.failure is not None:
            return
        if comparing:
            self._target.compare(bucket)
        else:
            self._target.load(bucket)

    def finish(self) -> None: ...

    def fail(self, why: Exception) -> None:
        self.failure = self.failure or why

    def close(self) -> None: ...


def deliver(
    executor: Executor, deliveries: Mapping[int, Delivery], parameters: Mapping[str, Tensor], verify: str
) -> float:
    """Exchange all buckets with the other hosts and hand them on. All processes of the executor's group call it.

    A failed delivery is left behind: the exchanges go on, and `failure` tells afterwards. Returns when, as
    time.monotonic counts, the last bucket was handed on that is copied.

    Args:
        deliveries: by the target rank.
        parameters: this process's source parameters, see `Executor.exchange`.
    """
    moved = time.monotonic()
    for comparing in passes(verify):
        for bucket in range(executor.num_buckets):
            buffers = {target: delivery.buffer(bucket) for target, delivery in deliveries.items()}
            executor.exchange(bucket, parameters, buffers)
            wait_for_device(executor.device)
            for target, why in executor.lost().items():
                deliveries[target].fail(PeerLost(why))
            for delivery in deliveries.values():
                delivery.filled(bucket, comparing)
        moved = moved if comparing else time.monotonic()
    return moved


# ------------------------------------------------------------------------------------------------ the loader


def load_envelope(reply: str, path: str, sync: int, deadline: float) -> str:
    """What `load_weights` gets as a tensor's name: the file to answer in, the channel's socket, the sync's number and
    how many seconds it may take."""
    return json.dumps({"reply": reply, "socket": path, "sync": sync, "deadline": deadline})


_target: Target | None = None
"""Of this process: opening a handle takes milliseconds, so that it is done once for each setup."""


def load_weights(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: takes the weights of one sync. Result: a LoadReport."""
    answer(named_tensors, lambda envelope: _load(model, envelope).to_json())


def _load(model: nn.Module, envelope: Mapping[str, Any]) -> LoadReport:
    until = time.monotonic() + envelope["deadline"]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    host = Connection(sock, "the trainer", until)
    try:
        try:
            sock.connect(envelope["socket"])
        except OSError:
            raise PeerLost(f"the trainer {WENT_AWAY} before the sync: nobody listens at {envelope['socket']}") from None
        return _take(model, host, envelope["sync"])
    except Exception as error:
        with contextlib.suppress(Exception):
            host.send(error=reason(error))
        raise
    finally:
        host.close()


def give_up(path: str, sync: int, why: str) -> None:
    """Tell a host that no loader will come to this sync, so that it does not wait for one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(sock), contextlib.suppress(OSError, PeerLost):
        sock.connect(path)
        Connection(sock, "the trainer", time.monotonic() + 1.0).send(sync=sync, error=why)


def _take(model: nn.Module, host: Connection, sync: int) -> LoadReport:
    start = time.monotonic()
    host.send(sync=sync, key=_target.setup.key if _target is not None else None)
    terms = host.receive()
    if "error" in terms:
        raise RuntimeError(f"the trainer refused: {terms['error']}")
    target = _set_up(terms)
    target.attach(dict(model.named_parameters()))
    num_buckets = len(target.setup.buckets)
    moved = start
    for step, (comparing, bucket) in enumerate((c, b) for c in passes(terms["verify"]) for b in range(num_buckets)):
        host.at = where(step, num_buckets)
        message = host.receive()
        assert message == {"filled": step}, f"the trainer said {message} {host.at}"
        if comparing:
            target.compare(bucket)
        else:
            target.load(bucket)
            moved = time.monotonic()
        host.send(drained=step)
    sums = target.sums() if terms["verify"] != OFF else []
    return target.report(sums, moved - start, time.monotonic() - moved)


def _set_up(terms: Mapping[str, Any]) -> Target:
    """This process's target: of a new setup, or the one it has."""
    global _target
    if "setup" in terms:
        _target = None  # its buffers are unmapped before the new ones are opened
        setup = Setup.from_json(terms["setup"])
        _target = Target(setup, [open_shared(base64.b64decode(handle)) for handle in terms["handles"]])
    assert _target is not None, "the trainer takes a setup for known that this process does not have"
    return _target
