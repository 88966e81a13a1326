"""Run a function on several gloo ranks: `run(function, num_ranks, *arguments)`.

The parent imports torch and megatron once and forks, so a case takes well under a second to start. Every run has a
deadline; no child outlives it, nor do its own children. The first error that any rank met is raised, with its rank.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

for name, value in {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}.items():
    os.environ.setdefault(name, value)

import torch
import torch.distributed as dist

from megarl.compat.megatron_cpu import install

install()
torch.set_num_threads(1)

import megarl.engines.megatron  # noqa: F401  (imported here, once, for all forks)

_FORK = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """A rank failed, or was not done at the deadline."""


def run(function: Callable[..., Any], num_ranks: int, *arguments: Any, deadline: float = 60.0) -> list[Any]:
    """Call function(*arguments) on each of `num_ranks` ranks of a fresh gloo world. Returns the results in rank order.

    Raises RankError with the traceback of the rank that failed first, or the names of the ranks that did not end."""
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = [], []
        try:
            for rank in range(num_ranks):
                ours, theirs = _FORK.Pipe(duplex=False)
                child = _FORK.Process(
                    target=_child, args=(theirs, rank, num_ranks, folder, function, arguments, deadline), daemon=False
                )
                child.start()
                theirs.close()
                children.append(child)
                pipes.append(ours)
            return _collect(pipes, time.monotonic() + deadline, getattr(function, "__name__", "function"))
        finally:
            for child in children:
                child.join(timeout=2)
                # Also after a clean end: a child may have left writer processes behind.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.join()


def _child(
    pipe: Any, rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: Any, deadline: float
) -> None:
    os.setpgid(0, 0)  # so that the parent can end this child with all of its own children
    faulthandler.dump_traceback_later(deadline, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=deadline),
        )
        result = function(*arguments)
        dist.barrier()
        pipe.send((True, result))
    except BaseException:  # the parent raises it, whatever it is
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's own teardown waits for ranks that may be gone


def _collect(pipes: list[Any], until: float, name: str) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(until - time.monotonic(), 0))
        if not ready:
            raise RankError(f"{name}: ranks {sorted(waiting.values())} of {len(pipes)} were not done at the deadline")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                is_good, value = pipe.recv()
            except EOFError:
                raise RankError(f"{name}: rank {rank} of {len(pipes)} died without a word") from None
            if not is_good:
                raise RankError(f"{name}: rank {rank} of {len(pipes)} failed\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]
