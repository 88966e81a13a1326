"""Prompts go out to replicas and come back in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl import config
from megarl.driver import rollout
from megarl.driver.rollout import Rollout
from megarl.types import Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee
from megarl.workers.generation import Group, Job

CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "rollout": {"tensor": 2},
        "cluster": {"gpus_per_node": 6},
        "run": {"deadline": 17},
    }
)


class Method:
    """A remote method: the call's reference is what it will give."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Method:
        def call(*arguments: Any) -> Any:
            self.called.append((name, *arguments))
            return [_answers(job) for job in arguments[0]] if name == "generate" else (self.number, name)

        return Method(call)


def _answers(job: Job) -> Group:
    infos = tuple(
        SampleInfo(
            f"{job.prompt.uid}/{k}", job.prompt.uid, len(job.prompt.token_ids), k + 1, k + 1, float(k), "stop", "s", 0
        )
        for k in range(job.num_answers)
    )
    return Group(infos, f"ref of {job.prompt.uid}", tuple((job.prompt.uid, str(k)) for k in range(job.num_answers)))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Callee], str, float]]:
    """`gather` gives the references back, and notes whom it was asked about."""
    asked: list[tuple[list[Callee], str, float]] = []

    def gather(refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        assert len(refs) == len(callees)
        asked.append((callees, stage, deadline))
        return refs

    monkeypatch.setattr(rollout, "gather", gather)
    return asked


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0-{i}", np.arange(i + 1), "s", "") for i in range(count)]


def submit(made: Rollout, count: int, answers: int = 2) -> None:
    made.submit(prompts(count), answers, SamplingParams(8), 5, "exact", with_texts=True)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_samples_come_in_the_order_of_their_prompts(gathered: list[Any], count: int) -> None:
    workers = [Worker(i) for i in range(3)]
    made = Rollout(CONFIG, workers, ["h0", "h1", "h2"], embedded=False)
    submit(made, count)
    batch = made.next_batch()
    assert [info.uid for info in batch.infos] == [f"0-{i}/{k}" for i in range(count) for k in range(2)]
    assert batch.groups == [[2 * i, 2 * i + 1] for i in range(count)]
    assert batch.handles == {2 * i + k: (f"ref of 0-{i}", k) for i in range(count) for k in range(2)}
    assert batch.texts == [(f"0-{i}", str(k)) for i in range(count) for k in range(2)]
    assert batch.lengths == [i + 1 + k + 1 for i in range(count) for k in range(2)]
    assert batch.num_tokens == sum(batch.lengths)
    # Shares differ by one prompt at the most, and a replica without a prompt is left alone.
    shares = [len(call[1]) for worker in workers for call in worker.called]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert len(shares) == min(count, 3)


def test_batches_come_in_the_order_of_submission(gathered: list[Any]) -> None:
    made = Rollout(CONFIG, [Worker(0), Worker(1)], ["h0", "h1"], embedded=False)
    submit(made, 3, answers=1)
    submit(made, 1, answers=1)
    with pytest.raises(AssertionError, match="in flight"):
        made.sleep()
    assert [len(made.next_batch().infos), len(made.next_batch().infos)] == [3, 1]
    with pytest.raises(AssertionError, match="without a batch"):
        made.next_batch()
    assert gathered[0] == ([Callee("SGLang replica 0", "h0"), Callee("SGLang replica 1", "h1")], "generation", 17)
    assert gathered[1][0] == [Callee("SGLang replica 0", "h0")]


def test_each_replica_gets_the_sockets_of_its_ranks() -> None:
    """Three replicas of two ranks."""
    workers = [Worker(i) for i in range(3)]
    made = Rollout(CONFIG, workers, ["h0", "h1", "h2"], embedded=False)
    calls = made.start_sync(4, ["s0", "s1", "s2", "s3", "s4", "s5"], 9, 7.0)
    assert calls == [((i, "sync"), Callee(f"SGLang replica {i}", f"h{i}")) for i in range(3)]
    assert [w.called for w in workers] == [
        [("sync", 4, ["s0", "s1"], 9, 7.0)],
        [("sync", 4, ["s2", "s3"], 9, 7.0)],
        [("sync", 4, ["s4", "s5"], 9, 7.0)],
    ]


def test_an_engine_on_gpus_of_its_own_keeps_its_memory_and_forgets_old_prefixes(gathered: list[Any]) -> None:
    own = config.build({"model": {"create": {}}, "data": {"create": {}}, "rollout": {"num_gpus": 2}})
    workers = [Worker(0), Worker(1)]
    made = Rollout(own, workers, ["h", "h"], embedded=False, gpus=[" (GPU 4)", " (GPU 5)"])
    made.sleep()
    made.wake_weights()
    made.resume()
    assert [worker.called for worker in workers] == [[("flush_cache",)]] * 2
    callees = [Callee("SGLang replica 0 (GPU 4)", "h"), Callee("SGLang replica 1 (GPU 5)", "h")]
    assert [asked[0] for asked in gathered] == [callees]


def test_memory_comes_and_goes_on_replicas_but_not_on_an_embedded_engine(gathered: list[Any]) -> None:
    replica, trainer = Worker(0), Worker(0)
    for worker, embedded in ((replica, False), (trainer, True)):
        made = Rollout(CONFIG, [worker], ["h"], embedded)
        made.sleep()
        made.wake_weights()
        made.resume()
        made.shutdown()
    assert replica.called == [
        ("sleep",),
        ("wake", ("weights",)),
        ("wake", ("kv_cache",)),
        ("flush_cache",),
        ("shutdown",),
    ]
    assert trainer.called == []
