"""The lines in the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from megarl.driver import progress
from megarl.driver.progress import Progress

START = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [START]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def shown(total_steps: int, first_step: int = 0) -> tuple[Progress, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, highlight=False, soft_wrap=True)
    return Progress(total_steps, first_step, console, START), output


def test_the_line_of_a_step(clock: list[float]) -> None:
    made, output = shown(120)
    clock[0] += 8.0  # two steps in 8 s: 118 more take 472 s
    made.step(2, 0.34, 0.4149, 3412.4)
    assert output.getvalue() == "step   2/120  reward 0.340  validation 0.415  3,412 tokens/s  0:07:52 left\n"


def test_time_left_after_a_resume_counts_only_the_steps_done_since(clock: list[float]) -> None:
    made, output = shown(20, first_step=10)
    clock[0] += 6.0  # two steps since: 3 s each, 8 to go
    made.step(12, -1.0, None, 0.4)
    assert output.getvalue() == "step 12/20  reward -1.000  validation -  0 tokens/s  0:00:24 left\n"


def test_brackets_are_text_and_not_markup(clock: list[float]) -> None:
    made, output = shown(1)
    made.say("data: [red]file[/red] 3")
    assert output.getvalue() == "data: [red]file[/red] 3\n"
