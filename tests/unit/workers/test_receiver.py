"""Receivers as real Ray processes, without GPUs."""

from __future__ import annotations

import os
import signal

import ray

from megarl import config
from megarl.workers.placement import place
from megarl.workers.receiver import Receivers

CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "cluster": {"device": "cpu"},
        "rollout": {"num_gpus": 2},
        "run": {"deadline": 60, "startup_deadline": 60},
    }
)


def test_one_that_has_died_is_started_anew_and_the_others_stay(local_ray: None) -> None:
    receivers = Receivers.start(CONFIG, place(CONFIG))
    assert [callee.name for callee in receivers.callees] == ["receiver of engine rank 0", "receiver of engine rank 1"]
    assert receivers.replace_dead() == []
    kept, died = receivers.actors
    pid = ray.get(died.__ray_call__.remote(lambda worker: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert receivers.replace_dead() == [1]
    assert receivers.actors[0] is kept
    ranks = [ray.get(actor.__ray_call__.remote(lambda worker: worker._syncs._rank)) for actor in receivers.actors]
    assert ranks == [1, 2]
    assert ray.get([actor.lost_replicas.remote() for actor in receivers.actors]) == [set(), set()]
    for actor in receivers.actors:
        ray.kill(actor)
