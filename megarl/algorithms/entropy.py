"""The weight of the entropy bonus: fixed, or steered so that the policy's entropy does not fall below a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class FixedEntropyController:
    """A coefficient that stays; below 0 it rewards certainty."""

    coef: float

    def bonus(self, entropy: float | None) -> float:
        """The coefficient of a step, whatever the entropy before its update."""
        return self.coef


@dataclass(frozen=True)
class AdaptiveEntropyController:
    """A coefficient that grows while the entropy is below `target`, and is in force only then; see `update`.

    Raises:
        ValueError: a coefficient or a target below 0, a step that is not above 0.
    """

    coef: float
    target: float
    """In nats a token, as actor/entropy is."""
    step: float

    def __post_init__(self) -> None:
        if not (self.coef >= 0 and self.target >= 0 and self.step > 0):
            raise ValueError(
                f"need coef and target of 0 or more and a step above 0, got coef={self.coef}, target={self.target}, "
                f"step={self.step}"
            )

    def bonus(self, entropy: float | None) -> float:
        """The coefficient of a step whose entropy before the update is `entropy`: coef at the target and below, else 0.

        Raises:
            ValueError: no entropy, which is then not known to be below the target.

        >>> controller = AdaptiveEntropyController(coef=0.25, target=1.0, step=0.125)
        >>> controller.bonus(0.5), controller.bonus(1.5)
        (0.25, 0.0)
        """
        if entropy is None:
            raise ValueError(f"the entropy must be known to be steered to {self.target}")
        return self.coef if entropy <= self.target else 0.0


EntropyController = FixedEntropyController | AdaptiveEntropyController
C = TypeVar("C", FixedEntropyController, AdaptiveEntropyController)


def update(controller: C, entropy: float | None) -> C:
    """The controller for the step after one whose entropy before its update was `entropy`.

        coef = coef + step                  entropy < target
        coef = max(coef - step, 0)          entropy > target

    Skywork Open Reasoner 1 (arXiv 2505.22312), adaptive entropy control: with `bonus`, the coefficient of step k is
    c_k where e_k <= target, else 0. A fixed controller is returned as it is, and so is an adaptive one at the target or
    when the entropy is NaN or not known.

    >>> controller = AdaptiveEntropyController(coef=0.25, target=1.0, step=0.125)
    >>> update(controller, 0.5).coef, update(controller, 1.5).coef, update(controller, 1.0).coef
    (0.375, 0.125, 0.25)
    """
    if isinstance(controller, FixedEntropyController) or entropy is None:
        return controller
    if entropy < controller.target:
        return replace(controller, coef=controller.coef + controller.step)
    if entropy > controller.target:
        return replace(controller, coef=max(controller.coef - controller.step, 0.0))
    return controller
