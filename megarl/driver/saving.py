"""Checkpoints of a run that are written while it goes on, one at a time."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

from megarl.driver.checkpoint import CheckpointStore, DriverState
from megarl.workers.group import TrainerGroup

VERSIONS = ("megarl", "torch", "megatron-core", "sglang", "transformers", "ray")


class Saver:
    """A checkpoint is one when its manifest is there, which comes last: a run that ends before leaves the one before
    it."""

    def __init__(self, group: TrainerGroup, checkpoints: CheckpointStore) -> None:
        self._group, self._checkpoints = group, checkpoints
        self._pending: tuple[str, DriverState] | None = None

    def start(self, state: DriverState) -> None:
        """Copy every role's state to host memory; files are written from there. Waits for the checkpoint before."""
        self.finish()
        folder = self._checkpoints.begin(state.step)
        self._group.call("saving a checkpoint", "start_save", folder)
        self._pending = folder, replace(state, versions=versions())

    def finish_if_written(self) -> None:
        """Make what was started a checkpoint, if all files are there."""
        if self._pending is not None and all(self._group.call("looking at a checkpoint", "is_saved")):
            self.finish()

    def finish(self) -> None:
        """Make what was started a checkpoint; waits for its files.

        Raises:
            WorkerError: a rank could not write them.
        """
        if self._pending is None:
            return
        folder, state = self._pending
        self._group.call("writing a checkpoint", "finish_save")
        self._checkpoints.commit(folder, state)
        self._pending = None


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
