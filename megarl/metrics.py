"""Metrics: sums that ranks can add, and the writers that keep them (TensorBoard, metrics.jsonl)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Stats:
    """Count, sum, largest and smallest of some values; two add up to those of both."""

    count: int = 0
    total: float = 0.0
    max: float = -math.inf
    min: float = math.inf

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Stats:
        array = np.asarray(values, np.float64)
        return cls(int(array.size), float(array.sum()), float(array.max()), float(array.min())) if array.size else cls()

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.count + other.count, self.total + other.total, max(self.max, other.max), min(self.min, other.min)
        )

    def named(self, name: str) -> dict[str, float]:
        """{"name/mean": ..., "name/max": ..., "name/min": ...}; nothing where there are no values."""
        if not self.count:
            return {}
        return {f"{name}/mean": self.total / self.count, f"{name}/max": self.max, f"{name}/min": self.min}


def length_metrics(name: str, lengths: Iterable[int], limit: int) -> dict[str, float]:
    """{name}/{mean,max,min,clip_ratio}: clip_ratio is the share that reached the limit."""
    values = np.asarray(list(lengths), np.float64)
    return {
        **Stats.of(values).named(name),
        f"{name}/clip_ratio": float((values >= limit).mean()) if values.size else 0.0,
    }


def balance_metrics(lengths: Iterable[int], loads: Iterable[int], num_ranks: int) -> dict[str, float]:
    """global_seqlen/*: tokens a data-parallel rank would have in the order of arrival (min, max, minmax_diff, mean),
    and has after balancing (balanced_min, balanced_max)."""
    parts = [sum(part) for part in np.array_split(np.asarray(list(lengths), np.int64), num_ranks)]
    loads = list(loads)
    return {
        "global_seqlen/min": float(min(parts)),
        "global_seqlen/max": float(max(parts)),
        "global_seqlen/minmax_diff": float(max(parts) - min(parts)),
        "global_seqlen/balanced_min": float(min(loads)),
        "global_seqlen/balanced_max": float(max(loads)),
        "global_seqlen/mean": float(sum(parts) / num_ranks),
    }


class MetricsWriter:
    """Writes every step's metrics to TensorBoard files and to metrics.jsonl in the run folder.

    A resumed run goes on in both: entries of steps after the one it resumes from are dropped. A run that starts anew
    (first_step 0) drops all that an earlier one left in the folder.
    """

    def __init__(self, folder: str, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(folder, exist_ok=True)
        self.tensorboard_folder = os.path.join(folder, "tensorboard")
        self.jsonl = os.path.join(folder, "metrics.jsonl")
        # Step 0 is the validation before training: a new run writes it again.
        first_written = first_step + 1 if first_step else 0
        _drop_from(self.jsonl, first_written)
        self._tensorboard = SummaryWriter(self.tensorboard_folder, purge_step=first_written)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics; what is not finite is kept as null in metrics.jsonl."""
        entry = {"step": step, "time": time.time(), **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        with open(self.jsonl, "a") as file:
            file.write(json.dumps(entry) + "\n")
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def write_texts(self, step: int, name: str, texts: Mapping[str, str]) -> None:
        for key, text in texts.items():
            self._tensorboard.add_text(f"{name}/{key}", text, step)

    def write_histogram(self, step: int, name: str, values: npt.ArrayLike) -> None:
        array = np.asarray(values)
        if array.size:
            self._tensorboard.add_histogram(name, array, step)

    def close(self) -> None:
        self._tensorboard.close()


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl, in order."""
    with open(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def _drop_from(path: str, step: int) -> None:
    """Drop the entries of this step and later ones, and a last line that a killed run left unfinished."""
    if not os.path.isfile(path):
        return
    with open(path) as file:
        lines = [line for line in file if line.endswith("\n") and line.strip()]
    with open(path + ".tmp", "w") as file:
        file.writelines(line for line in lines if json.loads(line)["step"] < step)
    os.replace(path + ".tmp", path)
