"""Runs megarl as its user does: the command line in a process of its own, with a deadline, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
UNREPEATABLE = ("time", "perf/", "timing_", "rollout/tokens_per_s", "rollout/idle_share", "rollout/tail_share")
"""What two equal runs may differ in: the clock and memory."""


@contextmanager
def started(*arguments: str, module: str = "megarl.cli") -> Iterator[subprocess.Popen[str]]:
    """`megarl train ...`, in a process group of its own that is killed at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def train(
    *arguments: str,
    deadline: float = 240.0,
    watch: Callable[[subprocess.Popen[str], str], None] | None = None,
    module: str = "megarl.cli",
) -> str:
    """Run to the end; the whole output. `watch` sees every line as it comes."""
    with started(*arguments, module=module) as process:
        guard = threading.Timer(deadline, lambda: os.killpg(process.pid, signal.SIGKILL))
        guard.start()
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if watch is not None:
                watch(process, line)
        process.wait(30)
        guard.cancel()
    output = "".join(lines)
    stopped = "stopped by" in output
    assert process.returncode == 0 or stopped, f"exit {process.returncode}\n{output[-4000:]}"
    return output


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """The entries of a run's metrics.jsonl by step, without what no two runs share."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {e["step"]: {k: v for k, v in e.items() if not k.startswith(UNREPEATABLE)} for e in entries}
