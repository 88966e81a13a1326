"""Megatron-Core 0.16.1 forks the writers of a checkpoint from a process that has threads and CUDA. Here threads write:
files are written outside of Python's lock. (What it spawns besides is replaced in megatron_cpu.py.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any


def write_in_threads() -> None:
    """For every save from now on."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Any) -> Exception | None:
    """In place of FileSystemWriterAsync.write_preloaded_data_multiproc: a thread a bucket, which is a file. results:
    gets what each has written, or the first exception, which is returned too."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    found: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    counted: queue.Queue[int] = queue.Queue()
    threads = []
    for number, bucket in enumerate(buckets):
        counted.put(number)
        arguments = (transforms, number, bucket, found, counted, True)
        options = {"use_msc": True} if use_msc else {}
        threads.append(
            threading.Thread(target=FileSystemWriterAsync.write_preloaded_data, args=arguments, kwargs=options)
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = dict(found.get() for _ in threads)
    failures = [one for one in written.values() if isinstance(one, Exception)]
    results.put(failures[0] if failures else written)
    return failures[0] if failures else None
