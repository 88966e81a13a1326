"""The shipped quickstarts, whole: greedy validation goes from under 0.2 to over 0.8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["quickstart", "quickstart_grpo"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.timeout(400)
def test_the_quickstart_learns(name: str, seed: int, tmp_path: Path) -> None:
    runs.train(str(runs.ROOT / "configs" / f"{name}.yaml"), f"run.dir={tmp_path}", f"run.seed={seed}", deadline=380)
    found = runs.metrics(tmp_path)
    assert found[0]["val-aux/all/reward/mean"] < 0.2
    assert found[max(found)]["val-aux/all/reward/mean"] > 0.8
