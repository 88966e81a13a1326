"""A checkpoint's files are written by threads while training goes on: only the copy to host memory holds it up."""

from __future__ import annotations

import queue
import shutil
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class PendingSave:
    """A save whose data have been copied and whose files are being written."""

    def __init__(self, request: Any, folder: str) -> None:
        """
        Args:
            request: Megatron's AsyncRequest, with the writer of compat/megatron_checkpoint.py. What it holds may change
                as soon as this returns.
        """
        arguments = list(request.async_fn_args)
        self.num_bytes = 0
        """Of this rank's tensors, which are in host memory until they are written."""
        # Megatron has one queue for the results of all saves: they go there when this one is finished.
        self._results, self._written = None, queue.SimpleQueue[Any]()
        if request.async_fn is not None:  # else this rank has nothing to write
            self._results, arguments[2] = arguments[2], self._written
            arguments[1] = list(map(_own, arguments[1], request.preload_fn()))
            self.num_bytes = sum(tensor.nbytes for _, _, (_, tensors) in arguments[1] for _, tensor in tensors)
        self._request, self._folder = request, folder
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, args=(arguments,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are written."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the files of all ranks, then write the index. Collective.

        Raises:
            RuntimeError: a rank could not write its files; on all ranks. There is no checkpoint then.
        """
        self._thread.join()
        if self._results is not None and not self._written.empty():
            self._results.put(self._written.get())
        dist.barrier()
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:
            if self._error is None:
                ranks = ", ".join(map(str, sorted(error.failures))) or "another"
                raise RuntimeError(f"{self._folder}: rank {ranks} could not write its files: {error}") from error
            free, gb = shutil.disk_usage(self._folder).free, 1e9
            raise RuntimeError(
                f"{self._folder}: rank {dist.get_rank()} could not write its files: {self._error}; its share is "
                f"{self.num_bytes / gb:.2f} GB, and {free / gb:.2f} GB are free there"
            ) from self._error

    def _write(self, arguments: list[Any]) -> None:
        try:
            if self._request.async_fn is not None:
                self._error = self._request.async_fn(*arguments, **self._request.async_fn_kwargs)
        except BaseException as error:  # `finish` finds no results then, and fails on all ranks
            self._error = error


def _own(bucket: Any, preloaded: Any) -> Any:
    """A bucket whose tensors nobody else writes to. Preloading has copied those of a GPU and left others as they
    are."""
    file_name, storage_key, (bytes_data, tensors) = preloaded
    copies = [
        (item, tensor.clone() if tensor is original else tensor)
        for (_, original), (item, tensor) in zip(bucket[2][1], tensors, strict=True)
    ]
    return file_name, storage_key, (bytes_data, copies)
