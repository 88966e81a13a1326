"""The command line: plan and keys, and what a bad configuration looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli, config

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")

LAZY = """
import sys
from megarl import cli
code = cli.main(sys.argv[1:])
heavy = [name for name in ("ray", "torch", "megatron", "sglang", "transformers") if name in sys.modules]
print("imported:", *heavy)
sys.exit(code)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which then says what was imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", LAZY, *arguments], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT
    )


def test_plan_prints_ranks_and_arithmetic_without_ray_or_torch() -> None:
    done = run("plan", QUICKSTART)
    assert done.returncode == 0, done.stderr
    assert "512 prompts x 1 answers = 512 samples a step" in done.stdout
    assert "actor: tensor 2 x pipeline 1 x context 1 x data 1 = 2 ranks" in done.stdout
    assert "critic: tensor 1 x pipeline 2 x context 1 x data 1 = 2 ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"


def test_a_bad_configuration_exits_2_with_every_violation_and_without_ray() -> None:
    done = run("train", QUICKSTART, "actor.parallel.tensor=3", "data.prompts_per_step=100", "runn.name=x")
    assert done.returncode == 2
    assert done.stdout == "imported:\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "4 problems in the configuration:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  * runn.name",
        "  * actor.parallel",
        "  * actor.batch.mini_batch_prompts",
        "  * critic.batch.mini_batch_prompts",
    ]


def test_more_files_are_laid_over_the_first(tmp_path: Path) -> None:
    """Wherever they stand among the values, and a value that ends like a file is none."""
    over = tmp_path / "over.yml"
    over.write_text("data: {prompts_per_step: 1024}\nrun: {seed: -2}\n")
    done = run("plan", QUICKSTART, "run.seed=3", str(over), "run.name=a.yaml", "rollout.n=2")
    assert done.returncode == 0, done.stderr
    assert "1024 prompts x 2 answers = 2048 samples a step" in done.stdout
    done = run("plan", QUICKSTART, str(over))
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [f"  * run.seed: is -2, must be 0 or more ({over})"]


def test_keys_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == config.config_keys()
    assert "critic.optimizer.lr" in lines
    assert "actor" not in lines
    assert len(set(lines)) == len(lines)


def test_train_gets_the_configuration_with_its_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl import train

    seen: list[config.Config] = []
    monkeypatch.setattr(train, "run_training", lambda given: seen.append(given) or 7)
    assert train.main([QUICKSTART, "run.seed=5", "actor.optimizer.lr=1e-5"]) == 7
    assert (seen[0].run.seed, seen[0].actor.optimizer.lr, seen[0].run.name) == (5, 1e-5, "quickstart")
