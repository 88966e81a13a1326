"""The learning rate as a function of the step, so that resuming needs the step and nothing else."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(step: int, base: float, min_lr: float, warmup_steps: int, total_steps: int, kind: str) -> float:
    """The learning rate of update number `step`, counted from 0 (the number of updates already made).

        step < warmup_steps:   base * (step + 1) / warmup_steps
        then, with progress = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:
        constant:              base
        linear:                base + (min_lr - base) * progress
        cosine:                min_lr + (base - min_lr) * (1 + cos(pi * progress)) / 2

    Cosine: SGDR: Stochastic Gradient Descent with Warm Restarts (arXiv 1608.03983), equation 5. The first update of a
    warm-up already has a rate above 0 (Hugging Face's schedules spend it at 0), the last one has `base`. min_lr is
    reached at step total_steps and held; the constant schedule uses neither it nor total_steps.

    Raises:
        ValueError: unknown kind; a negative step or warm-up; and unless kind is constant: min_lr outside [0, base], or
            a total_steps that is not above warmup_steps.

    >>> [learning_rate(step, 1.0, 0.0, warmup_steps=2, total_steps=6, kind="linear") for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if kind not in SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {kind!r}: use one of {', '.join(SCHEDULES)}")
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step and warmup_steps must not be negative, got step={step}, warmup_steps={warmup_steps}")
    if kind != "constant":
        if not 0.0 <= min_lr <= base:
            raise ValueError(f"min_lr must lie between 0 and the base rate, got min_lr={min_lr}, base={base}")
        if total_steps <= warmup_steps:
            raise ValueError(
                f"nothing is left to decay: total_steps={total_steps} is not above warmup_steps={warmup_steps}"
            )

    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if kind == "constant":
        return base
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    if kind == "linear":
        return base + (min_lr - base) * progress
    return min_lr + (base - min_lr) * (1.0 + math.cos(math.pi * progress)) / 2.0
