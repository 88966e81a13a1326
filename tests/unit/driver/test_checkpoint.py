"""Which folder is a checkpoint, which is the newest, which may go."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.driver.checkpoint import MANIFEST, CheckpointStore, DriverState, read_state


def state(step: int) -> DriverState:
    return DriverState(step, {"epoch": 1, "row": 2}, {"actor": 3, "critic": 4}, 0.125, 0.5, {"torch": "2"})


def save(store: CheckpointStore, step: int) -> str:
    folder = store.begin(step)
    Path(folder, "weights").write_text(str(step))
    return store.commit(folder, state(step))


def steps(store: CheckpointStore) -> list[int]:
    return [read_state(folder).step for folder in store.complete()]


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = save(CheckpointStore(str(tmp_path), keep=2), 7)
    assert folder == str(tmp_path / "checkpoints" / "step_000007")
    assert read_state(folder) == state(7)
    assert Path(folder, "weights").read_text() == "7"


def test_what_older_checkpoints_lack_is_not_known(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    adapted = replace(state(7), entropy_coef=0.015)
    folder = store.commit(store.begin(7), adapted)
    assert read_state(folder) == adapted
    manifest = Path(folder, MANIFEST)
    fields = json.loads(manifest.read_text())
    del fields["entropy_coef"]
    manifest.write_text(json.dumps(fields))
    assert read_state(folder) == state(7)
    assert state(7).entropy_coef is None


def test_an_unfinished_folder_is_never_chosen(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=0)
    assert (store.complete(), store.find("auto")) == ([], None)
    save(store, 3)
    # Killed before the manifest, between manifest and rename, and a folder that lost its manifest.
    store.begin(4)
    Path(store.begin(5), MANIFEST).write_text("{}")
    os.makedirs(os.path.join(store.folder, "step_000009"))
    assert steps(store) == [3]
    found = store.find("auto")
    assert found is not None
    assert found.endswith("step_000003")
    assert store.find("never") is None


def test_the_newest_is_so_by_number(tmp_path: Path) -> None:
    """1,000,000 has more digits than the name pads to: by name it would come before 999,999."""
    store = CheckpointStore(str(tmp_path), keep=0)
    for step in (1_000_000, 999_999, 20):
        save(store, step)
    assert steps(store) == [20, 999_999, 1_000_000]
    assert store.find("auto") == os.path.join(store.folder, "step_1000000")


def test_the_newest_are_kept_and_0_keeps_all(tmp_path: Path) -> None:
    two, every = CheckpointStore(str(tmp_path / "two"), 2), CheckpointStore(str(tmp_path / "all"), 0)
    for step in (2, 4, 10):
        save(two, step)
        save(every, step)
    assert (steps(two), steps(every)) == ([4, 10], [2, 4, 10])


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [6, 12])])
def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path, keep: int, left: list[int]) -> None:
    """Resumed from step 4 where 8 and 12 are: step 6 is the oldest but one, and must not go."""
    store = CheckpointStore(str(tmp_path), keep=3)
    for step in (4, 8, 12):
        save(store, step)
    folder = save(CheckpointStore(str(tmp_path), keep), 6)
    assert read_state(folder).step == 6
    assert steps(store) == left


def test_a_save_of_the_same_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    save(store, 3)
    folder = store.begin(3)
    assert steps(store) == [3]
    store.commit(folder, state(3))
    assert not os.path.exists(os.path.join(store.folder, "step_000003", "weights"))


def test_what_an_earlier_save_left_unfinished_goes(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    store.begin(3)
    assert os.path.basename(store.begin(4)) == "step_000004.partial"
    assert os.listdir(store.folder) == ["step_000004.partial"]


def test_a_given_folder_must_be_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(str(tmp_path), keep=2)
    with pytest.raises(ValueError, match="has no manifest.json: it is no checkpoint, or was not finished"):
        store.find(str(tmp_path))
    save(store, 3)
    monkeypatch.chdir(tmp_path)
    assert store.find("checkpoints/step_000003") == os.path.join(store.folder, "step_000003")


def test_going_on_from_an_earlier_checkpoint_sets_later_ones_aside_and_deletes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=0)
    for step in (2, 4, 6):
        store.commit(store.begin(step), state(step))
    moved = store.set_aside_after(2)
    assert [os.path.basename(f) for f in moved] == ["step_000004.set_aside", "step_000006.set_aside"]
    assert all(os.path.isfile(os.path.join(f, "manifest.json")) for f in moved)
    found = store.find("auto")
    assert found is not None
    assert os.path.basename(found) == "step_000002"
    save(store, 4)  # and again
    assert [os.path.basename(f) for f in store.set_aside_after(0)] == [
        "step_000002.set_aside",
        "step_000004.set_aside.1",
    ]
    assert store.find("auto") is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep=0)
    for coef in (0.1, 0.2):
        folder = store.begin(3)
        store.commit(folder, replace(state(3), kl_coef=coef))
    assert os.listdir(store.folder) == ["step_000003"]
    assert read_state(os.path.join(store.folder, "step_000003")).kl_coef == 0.2
