"""What trainer processes and the driver tell each other: plans, sums and references. Scalars only; tokens stay in the
object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.advantages import Moments
from megarl.algorithms.correction import CorrectionFigures
from megarl.algorithms.diagnostics import Mismatch
from megarl.config import BatchConfig
from megarl.metrics import Stats

MicroBatches = Sequence[Sequence[int]]
"""Sample indices of each micro-batch."""


@dataclass(frozen=True)
class ForwardResult:
    """What a forward pass leaves on the driver: a reference to {sample index: [R]}, and sums."""

    values: Any
    """None on ranks whose result another rank gives too."""
    entropy: Moments | None = None
    mismatch: Mismatch | None = None
    logprob_difference: Stats | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Retokenised:
    """Of one data-parallel rank's samples, as the reward model reads them."""

    lengths: Sequence[int]
    """Tokens of each."""
    num_truncated: int
    """Samples that lost their beginning."""


@dataclass(frozen=True)
class AdvantageResult:
    """Sums over one data-parallel rank's samples."""

    moments: Moments
    kl: Moments
    rewards: Stats
    correction: CorrectionFigures | None = None
    """With algorithm.correction on."""


@dataclass(frozen=True)
class WhitenedResult:
    """Sums over one data-parallel rank's samples, and a reference to {sample index: returns [R]} for the critic's
    ranks."""

    advantages: Stats
    returns: Stats
    residuals: Moments
    """Of returns less values."""
    return_moments: Moments
    returns_ref: Any


@dataclass(frozen=True)
class UpdatePlan:
    """One role's optimizer steps of a step of the loop, as one data-parallel rank does them."""

    mini_batches: Sequence[MicroBatches]
    denominators: Sequence[tuple[int, int]]
    """Per mini-batch: loss tokens and sequences that have any, over all ranks."""
    first_step: int
    """Optimizer steps done before."""
    total_steps: int
    entropy_coef: float = 0.0
    """The actor's: weight of the entropy bonus in this step."""


def limits(batch: BatchConfig, context: int, forward: bool) -> dict[str, int]:
    """The arguments of the scheduling functions that cut micro-batches."""
    if not batch.dynamic:
        return {"micro_batch_size": batch.micro_batch_size}
    return {"max_tokens": (batch.forward_max_tokens_per_gpu if forward else batch.max_tokens_per_gpu) * context}
