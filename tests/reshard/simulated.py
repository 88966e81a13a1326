"""Runs every rank's part of a plan in one process: the real Executor, a thread a rank, queues for a network."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from megarl.reshard import executor
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, Shape
from megarl.reshard.plan import ReshardPlan
from megarl.reshard.transports import copy_regions

CPU = torch.device("cpu")
Parameters = dict[str, torch.Tensor]
Result = TypeVar("Result")
DEADLINE = 20  # seconds that a rank waits for a message


class _Network:
    """What the executor uses of torch.distributed. Messages between two ranks arrive in the order in which they are
    sent, whatever their tags: as under NCCL."""

    isend, irecv = "isend", "irecv"

    def __init__(self) -> None:
        self.here = threading.local()
        self.has_failed = threading.Event()
        self.sent: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.messages: list[tuple[int, int, int]] = []
        """(sender, receiver, bytes)"""

    def P2POp(self, operation: str, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        return operation, tensor, peer

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        rank = self.here.rank
        for operation, tensor, peer in operations:
            if operation == self.isend:
                self._queue(rank, peer).put(tensor.clone())
                self.messages.append((rank, peer, tensor.numel()))
        for operation, tensor, peer in operations:
            if operation == self.irecv:
                message = self._next(peer, rank)
                assert message.shape == tensor.shape, f"{rank} expects {tensor.shape} of {peer}, gets {message.shape}"
                tensor.copy_(message)
        return []

    def _queue(self, sender: int, receiver: int) -> queue.Queue[torch.Tensor]:
        with self.lock:  # two threads that look up a new key at once would each make a queue
            return self.sent[sender, receiver]

    def _next(self, sender: int, receiver: int) -> torch.Tensor:
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until and not self.has_failed.is_set():
            with contextlib.suppress(queue.Empty):
                return self._queue(sender, receiver).get(timeout=0.05)
        raise TimeoutError(f"rank {receiver} has no message of rank {sender}")

    @staticmethod
    def get_global_rank(group: Any, rank: int) -> int:
        return rank


@contextmanager
def network() -> Iterator[_Network]:
    fake, real = _Network(), executor.dist
    executor.dist = fake  # type: ignore[assignment]
    try:
        yield fake
    finally:
        executor.dist = real
    assert all(q.empty() for q in fake.sent.values()), "a message was never received"


def on_every_rank(num_ranks: int, work: Callable[[int], Result]) -> list[Result]:
    """work(rank) on all ranks at once; raises the exception that came first."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    with network() as fake:

        def run(rank: int) -> None:
            fake.here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error
                fake.has_failed.set()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE)
        if errors:
            raise next(iter(errors.values()))
    return [results[rank] for rank in range(num_ranks)]


def receive(own: Executor, source: Parameters, targets: Sequence[Parameters]) -> None:
    """A process's part in all buckets: what arrives goes into the parameters of the target ranks that it hosts."""
    buffers = own.allocate()
    for bucket in range(own.num_buckets):
        own.exchange(bucket, source, buffers)
        for target, flat in buffers.items():
            layout = own.layout(bucket, target)
            if layout is not None:
                copy_regions(targets[target], layout.regions, flat)


def execute(
    plan: ReshardPlan, dtype: torch.dtype, sources: Sequence[Parameters], targets: Sequence[Parameters]
) -> None:
    """Execute a plan on one process a rank; target rank r is received by process r."""

    def work(rank: int) -> None:
        own = Executor(plan, dtype, rank, range(len(targets)), CPU)
        receive(own, sources[rank] if rank < len(sources) else {}, targets)

    on_every_rank(max(len(sources), len(targets)), work)


UNTOUCHED = -1.0
"""What `allocate` fills with; `distinct` never yields it."""


def allocate(layout: Layout, dtype: torch.dtype) -> list[Parameters]:
    """Every rank's parameters, filled with UNTOUCHED."""
    shards = (layout.shard(rank) for rank in range(layout.num_ranks))
    return [{n: torch.full(s, UNTOUCHED, dtype=dtype) for n, s in shard.parameters.items()} for shard in shards]


def distinct(tensors: Mapping[str, Shape], dtype: torch.dtype) -> Parameters:
    """Tensors in which every element differs from every other (float32), or that hold random finite bits (bfloat16)."""
    values, start = {}, 0
    for name, shape in tensors.items():
        count = int(torch.Size(shape).numel())
        if dtype == torch.float32:
            values[name] = torch.arange(start, start + count, dtype=dtype).reshape(shape)
        else:
            bits = torch.randint(0, 0x7F7F, shape, generator=torch.Generator().manual_seed(start))
            values[name] = bits.to(torch.int16).view(torch.bfloat16)
        start += count
    return values


def assert_equal(actual: Parameters, expected: Parameters, where: str = "") -> None:
    """The same names, shapes, types and bits."""
    assert actual.keys() == expected.keys(), where
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, f"{where} {name}"
        assert actual[name].shape == value.shape, f"{where} {name}"
        same = torch.equal(actual[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
        assert same, f"{where} {name}"
