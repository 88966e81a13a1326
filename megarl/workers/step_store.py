"""A trainer process's share of a step: its samples, and what forward passes and the advantage step computed for
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.data.packing import PackedBatch, TokenSequence, pack
from megarl.types import Sample
from megarl.workers.messages import MicroBatches


class StepStore:
    """Samples by their index in the step, and per-token arrays [R] by name and index."""

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self._values: dict[str, dict[int, np.ndarray]] = {}

    def put(self, name: str, values: Mapping[int, np.ndarray]) -> None:
        self._values.setdefault(name, {}).update(values)

    def get(self, name: str, indices: Sequence[int]) -> list[np.ndarray]:
        """Raises:
        KeyError: naming what is missing for which sample.
        """
        stored = self._values.get(name, {})
        missing = [i for i in indices if i not in stored]
        if missing:
            raise KeyError(
                f"{name} of samples {missing[:5]} is not on this rank ({len(missing)} of {len(indices)} missing)"
            )
        return [stored[i] for i in indices]

    def all(self, name: str) -> dict[int, np.ndarray]:
        return self._values.get(name, {})

    def batches(
        self,
        micro_batches: MicroBatches,
        multiple: int,
        per_token: Mapping[str, str] | None = None,
        per_sequence: Mapping[str, Mapping[int, float]] | None = None,
    ) -> list[PackedBatch]:
        """Pack micro-batches.

        Args:
            multiple: each sequence is padded to a multiple of this.
            per_token: name in the batch -> name in the store.
            per_sequence: name in the batch -> number of each sample.
        """
        return [
            pack(
                [TokenSequence.of(self.samples[i]) for i in indices],
                {name: self.get(stored, indices) for name, stored in (per_token or {}).items()},
                {name: [values[i] for i in indices] for name, values in (per_sequence or {}).items()},
                multiple,
            )
            for indices in micro_batches
        ]
