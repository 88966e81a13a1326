"""What a save holds is its own; whoever could not write says so."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megarl.engines import saving
from megarl.engines.saving import PendingSave


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.dist, "barrier", lambda: None)
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 3)


def request(
    live: torch.Tensor, on_host: torch.Tensor, write: Callable[..., Exception | None], *finalize: Callable[[], None]
) -> SimpleNamespace:
    """Megarl's stand-in for an AsyncRequest: a file with one tensor, which preloading brings to the host."""

    def bucket(tensor: torch.Tensor) -> list[Any]:
        return [("file", "key", ([], [("item", tensor)]))]

    return SimpleNamespace(
        async_fn=write,
        async_fn_args=[0, bucket(live), None],
        async_fn_kwargs={},
        preload_fn=lambda: bucket(on_host),
        finalize_fns=finalize,
    )


def test_a_tensor_of_the_host_may_change_as_soon_as_the_save_has_begun(tmp_path: Path) -> None:
    live, changed, written = torch.ones(3), threading.Event(), []

    def write(rank: int, buckets: Any, results: Any) -> None:
        assert changed.wait(10)
        written.append(buckets[0][2][1][0][1].tolist())

    save = PendingSave(request(live, live, write), str(tmp_path))
    assert not save.is_written
    live.zero_()
    changed.set()
    save.finish()
    assert save.is_written
    assert written == [[1.0, 1.0, 1.0]]
    assert save.num_bytes == 12


def test_what_came_from_a_gpu_is_not_copied_again(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    on_host = torch.zeros(2)

    def write(rank: int, buckets: Any, results: Any) -> None:
        seen.append(buckets[0][2][1][0][1])

    PendingSave(request(torch.ones(2), on_host, write), str(tmp_path)).finish()
    assert seen[0] is on_host


def test_a_rank_without_anything_to_write_takes_part(tmp_path: Path) -> None:
    order: list[str] = []
    nothing = SimpleNamespace(
        async_fn=None,
        async_fn_args=[],
        async_fn_kwargs={},
        preload_fn=None,
        finalize_fns=[lambda: order.append("index")],
    )
    save = PendingSave(nothing, str(tmp_path))
    save.finish()
    assert (save.num_bytes, order) == (0, ["index"])


def test_the_index_comes_after_the_files(tmp_path: Path) -> None:
    order: list[str] = []
    save = PendingSave(
        request(torch.ones(1), torch.ones(1), lambda *_: order.append("files"), lambda: order.append("index")),
        str(tmp_path),
    )
    save.finish()
    assert order == ["files", "index"]


def fail() -> None:
    raise CheckpointException("write", {1: (RuntimeError("Worker failure: disk"), None)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda *_: OSError("no room"), "rank 3 could not write its files: no room; its share is 0.00 GB, and"),
        (lambda *_: None, "rank 1 could not write its files: .*Worker failure: disk"),
    ],
    ids=["own", "another"],
)
def test_a_failure_names_the_rank_and_the_reason(
    tmp_path: Path, write: Callable[..., Exception | None], words: str
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){tmp_path}: {words}"):
        PendingSave(request(torch.ones(1), torch.ones(1), write, fail), str(tmp_path)).finish()


def test_of_two_saves_at_once_each_finds_its_own_results(tmp_path: Path) -> None:
    """Megatron's queue is one for both; the second save's files are written first."""
    shared: queue.Queue[str] = queue.Queue()
    is_second_written, found = threading.Event(), []

    def save(name: str, write: Callable[..., None]) -> PendingSave:
        asked = request(torch.ones(1), torch.ones(1), write, lambda: found.append((name, shared.get_nowait())))
        asked.async_fn_args[2] = shared
        return PendingSave(asked, str(tmp_path))

    def late(rank: int, buckets: Any, results: Any) -> None:
        assert is_second_written.wait(10)
        results.put("of the actor")

    def early(rank: int, buckets: Any, results: Any) -> None:
        results.put("of the critic")
        is_second_written.set()

    first, second = save("actor", late), save("critic", early)
    first.finish()
    second.finish()
    assert found == [("actor", "of the actor"), ("critic", "of the critic")]
    assert shared.empty()
