"""How far the rollout engine's log-probs lie from the trainer's, for the same tokens under the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.algorithms.advantages import Moments
from megarl.algorithms.diagnostics import Mismatch, mismatch
from megarl.metrics import Stats
from megarl.types import FloatArray, Sample


def rollout_mismatch(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> tuple[Mismatch, Stats]:
    """(of probabilities, as verl reports it; of log-probs: their absolute differences) over loss tokens."""
    if not samples:
        return Mismatch(Moments(0, 0.0, 0.0), 0.0), Stats()
    rollout = np.concatenate([s.rollout_logprobs for s in samples])
    trainer = np.concatenate(list(logprobs))
    mask = np.concatenate([s.loss_mask for s in samples])
    probabilities = mismatch(torch.from_numpy(rollout), torch.from_numpy(trainer), torch.from_numpy(mask))
    return probabilities, Stats.of(np.abs(rollout - trainer)[mask])
