"""Every shipped configuration loads, and the list of keys is the one that was agreed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import config

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs" / "algorithms").glob("*.yaml"))
SHIPPED = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p not in PRESETS)
GOLDEN = Path(__file__).with_name("config_keys.txt")


def _inputs(path: Path, folder: Path) -> list[str]:
    """Overrides that put files in place of those which a recipe leaves to its user."""
    sections = yaml.safe_load(path.read_text())
    overrides = []
    if "path" in sections.get("model", {}):
        (folder / "config.json").write_text("{}")
        overrides.append(f"model.path={folder}")
    for key in ("train", "validation"):
        if key in sections.get("data", {}):
            (folder / f"{key}.parquet").write_bytes(b"")
            overrides.append(f"data.{key}=[{folder / key}.parquet]")
    return overrides


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    loaded = config.load(str(path), _inputs(path, tmp_path))
    again = tmp_path / "resolved.yaml"
    again.write_text(config.to_yaml(loaded))
    assert config.load(str(again)) == loaded


BASES = [ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "quickstart_grpo.yaml"]


@pytest.mark.parametrize("base", BASES, ids=lambda p: p.stem)
@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_every_preset_can_be_laid_over_a_run_of_any_other_algorithm(preset: Path, base: Path) -> None:
    loaded = config.load([str(base), str(preset)], ["rollout.n=8"])
    for other in PRESETS:
        assert config.load([str(base), str(other), str(preset)], ["rollout.n=8"]) == loaded, other


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_preset_cites_its_paper_and_holds_the_algorithm_alone(preset: Path) -> None:
    text = preset.read_text()
    assert text.startswith("#")
    assert "arXiv:" in text.split("algorithm:")[0]
    sections = yaml.safe_load(text)
    assert set(sections) == {"actor", "algorithm", "rollout"}
    assert set(sections["rollout"]) == {"keep_groups"}
    assert not set(sections["actor"]) & {"parallel", "optimizer", "batch", "offload", "recompute"}


def test_config_keys_are_the_golden_ones() -> None:
    """A key that appears, goes or is renamed is a decision: change config_keys.txt in the same commit."""
    assert config.config_keys() == GOLDEN.read_text().split()


def test_every_key_of_verl_that_is_mapped_points_at_a_key_of_ours() -> None:
    keys = set(config.config_keys())
    for ours in config.VERL_KEYS.values():
        named = [word for word in ours.replace("(", " ").replace(")", " ").split() if "." in word and ":" not in word]
        assert named, ours
        assert all(name in keys for name in named if name != "package.module"), ours


def test_import_layers_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
