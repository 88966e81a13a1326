"""Calls that fail, die or do not answer, with real Ray processes: the error says who, where, when and why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from megarl.workers.calls import Callee, WorkerError, gather

CALLEES = [Callee(f"trainer rank {i}", f"node{i}") for i in range(3)]


def worker_class() -> type:
    """Made here, so that it travels to the processes by value: they cannot import this file."""

    class Worker:
        def give(self, value: Any, after: float = 0.0) -> Any:
            time.sleep(after)
            return value

        def fail(self, text: str, after: float = 0.0) -> None:
            time.sleep(after)
            raise ZeroDivisionError(text)

        def die(self) -> None:
            os._exit(3)

    return Worker


@pytest.fixture(scope="module")
def workers(local_ray: None) -> Iterator[list[Any]]:
    """Threads let a process answer the next test while it is stuck in a call of the last one."""
    remote = ray.remote(worker_class())
    made = [remote.options(num_cpus=0, max_concurrency=4).remote() for _ in CALLEES]
    ray.get([w.give.remote(None) for w in made])
    yield made
    for worker in made:
        ray.kill(worker)


def error(refs: list[Any], deadline: float = 60.0) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        gather(refs, CALLEES, "actor update", deadline)
    return str(caught.value), time.monotonic() - start


def test_results_come_in_the_order_of_the_calls(workers: list[Any]) -> None:
    refs = [w.give.remote(i, after=0.2 if i == 0 else 0.0) for i, w in enumerate(workers)]
    assert gather(refs, CALLEES, "stage", 60.0) == [0, 1, 2]
    # What is there already is given even when no time is left.
    assert gather(refs, CALLEES, "stage", 0.0) == [0, 1, 2]
    assert gather([], [], "stage", 0.0) == []


def test_the_first_failure_is_named_while_others_are_stuck(workers: list[Any]) -> None:
    text, seconds = error(
        [workers[0].give.remote(0, 30.0), workers[1].fail.remote("x is 0"), workers[2].give.remote(2)]
    )
    assert text.startswith("actor update: trainer rank 1 on node1 failed: ZeroDivisionError: x is 0\n")
    assert "in fail" in text
    assert "\x1b[" not in text
    assert seconds < 10.0


def test_the_root_failure_is_preferred_over_its_echo(workers: list[Any]) -> None:
    echo = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    text, _ = error([workers[0].fail.remote(echo), workers[1].give.remote(1), workers[2].fail.remote("the root", 0.4)])
    assert text.startswith("actor update: trainer rank 2 on node2 failed: ZeroDivisionError: the root")


def test_an_echo_alone_is_shown(workers: list[Any]) -> None:
    text, _ = error([workers[0].fail.remote("Connection reset by peer"), *(w.give.remote(0) for w in workers[1:])])
    assert "trainer rank 0 on node0 failed: ZeroDivisionError: Connection reset by peer" in text


def test_who_did_not_answer_is_named(workers: list[Any]) -> None:
    text, seconds = error(
        [workers[0].give.remote(0, 30.0), workers[1].give.remote(1), workers[2].give.remote(2, 30.0)], 0.5
    )
    assert text == (
        "actor update: no answer within 0.5 s from trainer rank 0 on node0, trainer rank 2 on node2 "
        "(run.deadline, at start run.startup_deadline)"
    )
    assert 0.4 <= seconds < 4.0


def test_the_death_of_a_process_is_named(workers: list[Any]) -> None:
    """The last test: it costs a process. First the other rank's echo comes with it, then it is alone."""
    text, _ = error([workers[0].give.remote(0), workers[1].die.remote(), workers[2].fail.remote("Broken pipe")])
    assert text.startswith("actor update: trainer rank 1 on node1 failed: the process died (ActorDiedError)")
    text, _ = error([w.give.remote(0) for w in workers])
    assert text.startswith("actor update: trainer rank 1 on node1 failed: the process died (ActorDiedError)")
