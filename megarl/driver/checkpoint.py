"""Checkpoints of a run: one folder a step, complete when its manifest is there, the newest K kept."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any

MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_OLD = ".old"
_SET_ASIDE = ".set_aside"
_FOLDER = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class DriverState:
    """What the driver itself must remember to go on as if it had never stopped."""

    step: int
    """Steps done."""
    data_cursor: dict[str, Any]
    optimizer_steps: dict[str, int]
    kl_coef: float
    last_validation: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    entropy_coef: float | None = None
    """With actor.entropy_target; None: not adapted so far."""


class CheckpointStore:
    """The folder `checkpoints` of a run."""

    def __init__(self, run_folder: str, keep: int) -> None:
        self.folder, self._keep = os.path.abspath(os.path.join(run_folder, "checkpoints")), keep

    def begin(self, step: int) -> str:
        """A folder to write a checkpoint into; nobody takes it for one before `commit`. What earlier saves left
        unfinished goes."""
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):
            if name.endswith((_PARTIAL, _PARTIAL + _OLD)):
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
        folder = os.path.join(self.folder, f"step_{step:06d}{_PARTIAL}")
        os.makedirs(folder)
        return folder

    def commit(self, folder: str, state: DriverState) -> str:
        """Make the folder a checkpoint: the manifest is written last, then the folder takes its name. Old ones go."""
        path = os.path.join(folder, MANIFEST)
        with open(path, "w") as file:
            json.dump(asdict(state), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        final = folder.removesuffix(_PARTIAL)
        if os.path.isdir(final):  # the same step saved again: the old one goes once the new one is in its place
            os.rename(final, folder + _OLD)
        os.rename(folder, final)
        _sync_folder(self.folder)
        shutil.rmtree(folder + _OLD, ignore_errors=True)
        if self._keep > 0:
            # A run that resumed from an older checkpoint may find newer ones: its own must not go for being older.
            others = [other for other in self.complete() if other != final]
            for old in others[: len(others) - (self._keep - 1)]:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def set_aside_after(self, step: int) -> list[str]:
        """Rename checkpoints of later steps, so that a run which goes on from an earlier one is not taken for them at
        the next start. Nothing is deleted; returns the new names."""
        renamed = []
        for folder in self.complete():
            if read_state(folder).step > step:
                names = (folder + _SET_ASIDE + (f".{n}" if n else "") for n in itertools.count())
                renamed.append(next(name for name in names if not os.path.exists(name)))
                os.rename(folder, renamed[-1])
        return renamed

    def complete(self) -> list[str]:
        """Checkpoints that are whole, oldest first."""
        if not os.path.isdir(self.folder):
            return []
        names = [
            n
            for n in os.listdir(self.folder)
            if _FOLDER.match(n) and os.path.isfile(os.path.join(self.folder, n, MANIFEST))
        ]
        return [os.path.join(self.folder, n) for n in sorted(names, key=lambda n: int(n.removeprefix("step_")))]

    def find(self, resume: str) -> str | None:
        """The checkpoint to resume from: run.resume is auto, never, or a checkpoint's folder.

        Raises:
            ValueError: the given folder is no checkpoint, or an incomplete one.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return next(iter(reversed(self.complete())), None)
        if not os.path.isfile(os.path.join(resume, MANIFEST)):
            raise ValueError(f"run.resume: {resume} has no {MANIFEST}: it is no checkpoint, or was not finished")
        return os.path.abspath(resume)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: str) -> DriverState:
    """The driver's state in a checkpoint."""
    with open(os.path.join(folder, MANIFEST)) as file:
        return DriverState(**json.load(file))
