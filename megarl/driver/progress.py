"""What the terminal shows: a line a step with reward, validation, tokens/s and time left, and one at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console


@dataclass
class Progress:
    """Prints progress; `first_step` is the step that a resumed run starts after."""

    total_steps: int
    first_step: int = 0
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    _started: float = field(default_factory=time.monotonic)

    def start_clock(self) -> None:
        """The time left is reckoned from here: building does not count."""
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def step(self, step: int, reward: float, validation: float | None, tokens_per_second: float) -> None:
        """One line: step 12/120  reward 0.34  validation 0.41  3,412 tokens/s  0:01:12 left."""
        done = step - self.first_step
        left = (time.monotonic() - self._started) / max(done, 1) * (self.total_steps - step)
        shown = "-" if validation is None else f"{validation:.3f}"
        width = len(str(self.total_steps))
        self.console.print(
            f"step {step:>{width}}/{self.total_steps}  reward {reward:.3f}  validation {shown}  "
            f"{tokens_per_second:,.0f} tokens/s  {timedelta(seconds=round(left))} left",
            markup=False,
        )
