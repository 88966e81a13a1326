"""Communicators of the weight sync: one a replica, outside torch.distributed's world, each aborted and made anew alone.

A replica's communicator joins the processes that receive for its ranks and those that send to them by the plan. A
process that is in several starts their messages in ascending order of replicas, as all others do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.reshard.executor import Message, start_messages
from megarl.reshard.plan import ReshardPlan

MAX_BLOCKS = 64
"""Thread blocks of NCCL that are at work on a GPU at a time: so few have room on any, whatever else they wait for."""

MAX_IN_FLIGHT = 16
"""Communicators over which a process has messages under way at a time, over NCCL."""

POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class Membership:
    """Who is in a replica's communicator; counted up, the generation makes another one of the same processes."""

    ranks: tuple[int, ...]
    generation: int = 0


def memberships(plan: ReshardPlan, hosts: Sequence[int], generations: Mapping[int, int]) -> dict[int, Membership]:
    """By replica of the plan's target, who is in its communicator: every process that sends to it or receives for it.
    A replica that gets all from the processes which receive for it has none.

    Args:
        hosts: per target rank, the process that receives for it.
        generations: by replica; 0 where it is missing.
    """
    assert plan.target.replica_of, "a layout that says which replica each rank belongs to is needed"
    found: dict[int, set[int]] = {}
    for copy in plan.copies:
        if copy.source_rank != hosts[copy.target_rank]:
            members = found.setdefault(plan.target.replica_of[copy.target_rank], set())
            members.update((copy.source_rank, hosts[copy.target_rank]))
    return {
        replica: Membership(tuple(sorted(found[replica])), generations.get(replica, 0)) for replica in sorted(found)
    }


@dataclass
class _Flight:
    """Messages under way over one communicator."""

    replica: int
    works: list[Any] = field(default_factory=list)


class Communicators:
    """This process's communicators. A replica whose communicator fails is left behind, with the reason in `lost`, until
    `assign` gives it a new one; the others' messages go on."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        """
        Args:
            store: of torch.distributed, that all processes of the sync reach, and use for nothing else.
            rank: of this process among all of the sync.
        """
        self._store, self._rank, self._device = store, rank, device
        self._members: dict[int, Membership] = {}
        self._backends: dict[int, Any] = {}
        self._replica_of: Sequence[int] = ()
        self._until = 0.0
        self._order: list[int] = []
        self.lost: dict[int, str] = {}

    def assign(self, members: Mapping[int, Membership], replica_of: Sequence[int]) -> None:
        """Take these communicators from now on; the ones that are the same are kept, the others aborted.

        Args:
            members: by replica, of all replicas.
            replica_of: per target rank, its replica.
        """
        self._replica_of, self._order = replica_of, sorted(members)
        mine = {replica: own for replica, own in members.items() if self._rank in own.ranks}
        for replica in [r for r, own in self._members.items() if mine.get(r) != own]:
            self.abort(replica)
            self.lost.pop(replica, None)
        self._members = mine

    def connect(self, until: float) -> None:
        """Make the communicators that are not made yet; nothing that comes later waits longer than until then.

        Args:
            until: as time.monotonic counts.
        """
        self._until, start = until, time.monotonic()
        for number, replica in enumerate(self._order):
            if replica in self._members and replica not in self._backends and replica not in self.lost:
                # Whoever waits in vain for a member of one has time left for the next, in which others wait for it.
                share = (number + 1) / (len(self._order) + 1)
                with self._noting(replica):
                    self._backends[replica] = self._make(replica, start + share * (until - start))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Exchange messages, each over the communicator of its target rank (the message's tag), and wait for them.
        Messages of a replica that is lost are dropped."""
        flights: list[_Flight] = []
        most = MAX_IN_FLIGHT if self._device.type == "cuda" else max(len(self._members), 1)
        for replica, members in sorted(self._members.items()):
            own = [[self._renumbered(m, members) for m in part if self._replica_of[m.tag] == replica]
                   for part in (sends, receives)]  # fmt: skip
            if not any(own):
                continue
            flights.append(_Flight(replica))
            if len(flights) > most:
                self._finish(flights[-1 - most])
            if replica in self._backends:
                with self._noting(replica):
                    flights[-1].works = start_messages(self._backends[replica], *own)
        for flight in flights[-most:]:
            self._finish(flight)

    def abort(self, replica: int) -> None:
        """End a communicator, so that whoever waits for this process over it fails; `assign` makes another."""
        _abort(self._backends.pop(replica, None))

    def close(self) -> None:
        """End all of them."""
        for replica in list(self._backends):
            self.abort(replica)
        self._members = {}

    def _finish(self, flight: _Flight) -> None:
        with self._noting(flight.replica):
            for work in flight.works:
                self._wait(work)
        flight.works = []

    def _wait(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()  # the stream does, not this thread
            ended = _mark(self._device)
            while not ended.query():
                if time.monotonic() > self._until:
                    raise TimeoutError("its messages did not end until the deadline (run.deadline)")
                time.sleep(POLL_SECONDS)
        else:
            work.wait(_left(self._until))

    @contextlib.contextmanager
    def _noting(self, replica: int) -> Iterator[None]:
        """A failure loses the replica: its communicator is aborted, and only the text is kept, for a traceback would
        hold the connections."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:  # torch.distributed's own errors are RuntimeErrors
            reason = str(error).split("\nException raised from")[0]  # torch adds a C++ stack
            self.lost[replica] = f"the communicator of rollout replica {replica} broke: {reason}"
        if replica in self.lost:
            self.abort(replica)

    def _renumbered(self, message: Message, members: Membership) -> Message:
        return Message(members.ranks.index(message.peer), message.tag, message.data)

    def _make(self, replica: int, until: float) -> Any:
        members = self._members[replica]
        # Apart: NCCL keeps its own number under the key "0", and whoever found our word there would take it for that.
        meeting, store = (
            dist.PrefixStore(  # type: ignore[attr-defined, unused-ignore]
                f"replica {replica}, {members}, {use}/", self._store
            )
            for use in ("meeting", "backend")
        )
        self._meet(meeting, members, until)
        rank, size = members.ranks.index(self._rank), len(members.ranks)
        if self._device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, size, _left(until))
        backend = _nccl(store, rank, size, _left(until), MAX_BLOCKS // min(len(self._order), MAX_IN_FLIGHT))
        try:
            # NCCL wants all ranks in a communicator's first operation; a bucket may leave some without a message.
            self._wait(backend.allreduce([torch.zeros(1, device=self._device)]))
        except BaseException:
            _abort(backend)
            raise
        return backend

    def _meet(self, store: Any, members: Membership, until: float) -> None:
        """Wait for the other members: who makes a communicator waits without a deadline for one that never comes."""
        store.set(str(self._rank), "here")
        for rank in members.ranks:
            try:
                store.wait([str(rank)], _left(until))
            except RuntimeError:
                raise TimeoutError(f"process {rank} did not come in time (run.deadline)") from None


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 0.001))


def _mark(device: torch.device) -> Any:
    """An event after all that was enqueued on the current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call, unused-ignore]
    return event


def _abort(backend: Any) -> None:
    """Gloo's connections are closed with the last reference to it, not by abort (torch 2.13); NCCL's kernels end."""
    if backend is not None and not isinstance(backend, dist.ProcessGroupGloo):
        backend.abort()


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, max_blocks: int) -> Any:
    backend: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = backend.Options()
    options._timeout = timeout
    options.config.max_ctas = min(max_blocks, 32)  # NCCL's own limit
    # By default a watchdog ends the whole process when a peer is late; here `exchange` looks after that.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    known = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return backend(store, rank, size, options)
    finally:
        os.environ.pop(name)
        os.environ.update({name: known} if known is not None else {})
