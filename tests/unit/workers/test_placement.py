"""Where processes go and what their environment is, on a machine without GPUs."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from megarl import config
from megarl.config import ClusterConfig
from megarl.reshard.plan import Place
from megarl.workers import placement
from megarl.workers.placement import (
    Seat,
    actor_options,
    common_address,
    environment,
    free_port,
    in_order,
    on_gpus,
    place,
    places,
    reserve,
    uses_gpus,
)

CPU = ClusterConfig(device="cpu", threads_per_rank=3)


def seat(node: str, gpu: int | None, bundle: int = 0) -> Seat:
    return Seat(node, f"host {node}", f"address {node}", gpu, "", bundle)


def test_a_process_without_a_gpu_waits_for_no_resources() -> None:
    """Ray would let a process that asks for a CPU wait for ever on a machine with few."""
    assert not uses_gpus(CPU)
    assert reserve(CPU, 2, 1.0) is None
    assert actor_options(None, 0, 0.5, {"A": "1"}) == {
        "num_cpus": 0,
        "max_restarts": 0,
        "runtime_env": {"env_vars": {"A": "1"}},
    }


def test_the_loopback_is_for_one_node_only() -> None:
    one, two = environment(CPU), environment(ClusterConfig(device="cpu", num_nodes=2))
    assert (one["GLOO_SOCKET_IFNAME"], one["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert "GLOO_SOCKET_IFNAME" not in two
    assert "NCCL_SOCKET_IFNAME" not in two


def test_threads_are_limited_on_the_cpu_and_chosen_variables_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MEGARL_SECRET", "x")
    found = environment(CPU)
    assert (found["OMP_NUM_THREADS"], found["NCCL_DEBUG"]) == ("3", "INFO")
    assert "MEGARL_SECRET" not in found
    assert "OMP_NUM_THREADS" not in environment(ClusterConfig(device="cuda"))
    assert found["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port("127.0.0.1")))


# ------------------------------------------------------------------------------------------------ split placement


def split(**cluster: Any) -> config.Config:
    """Four trainers, and a replica of two GPUs."""
    return config.build(
        {
            "model": {"create": {}},
            "data": {"create": {}},
            "cluster": {"gpus_per_node": 4, **cluster},
            "rollout": {"tensor": 2, "num_gpus": 2},
        }
    )


def test_without_gpus_the_engines_processes_come_after_the_trainers() -> None:
    found = place(split(device="cpu"))
    assert (found.bundles, found.trainers, found.engine) == (None, (0, 1, 2, 3), (4, 5))
    assert found.variables["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("seed", range(5))
def test_trainers_are_on_few_nodes_and_a_replicas_gpus_are_neighbours(seed: int) -> None:
    """The first node by name has two of six GPUs; whichever bundle has which."""
    seats = [seat("a", gpu) for gpu in (1, 0)] + [seat("b", gpu) for gpu in (6, 3, 5, 4)]
    random.Random(seed).shuffle(seats)
    found = in_order([Seat(**{**s.__dict__, "bundle": i}) for i, s in enumerate(seats)])
    assert [(s.node, s.gpu) for s in found] == [("b", 3), ("b", 4), ("b", 5), ("b", 6), ("a", 0), ("a", 1)]


def test_bundles_are_given_by_what_ray_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node: bundle i has GPU 7 - i. On two, nothing is bound to the loopback."""
    asked: list[Any] = []
    found = {"seats": [seat("a", 7 - bundle, bundle) for bundle in range(6)]}
    monkeypatch.setattr(placement, "reserve", lambda *arguments: asked.append(arguments) or "bundles")
    monkeypatch.setattr(placement, "_look", lambda *_: found["seats"])
    made = place(split())
    assert asked[0][1] == 2
    assert (made.bundles, made.trainers, made.engine) == ("bundles", (5, 4, 3, 2), (1, 0))
    assert made.variables["NCCL_SOCKET_IFNAME"] == "lo"
    found["seats"][0] = seat("b", 0, 0)
    made = place(split(address="auto"))
    assert (made.trainers, made.engine) == ((5, 4, 3, 2), (1, 0))
    assert "NCCL_SOCKET_IFNAME" not in made.variables


def test_too_few_gpus_are_an_error_with_both_numbers_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": 5.0})
    cuda = ClusterConfig(device="cuda", gpus_per_node=4)
    message = (
        "^cluster.num_nodes x cluster.gpus_per_node = 4 and rollout.num_gpus = 2 GPUs are asked for, but Ray sees 5 "
        "on this machine; lower them"
    )
    with pytest.raises(ValueError, match=message):
        reserve(cuda, 2, 1.0)

    class Never:
        def wait(self, timeout_seconds: float) -> bool:
            return False

    bundles: list[Any] = []
    monkeypatch.setattr(placement, "placement_group", lambda wanted, strategy: bundles.extend(wanted) or Never())
    with pytest.raises(ValueError, match="= 4 and rollout.num_gpus = 2 GPUs .* no 6 within 1 s; the cluster has 5"):
        reserve(ClusterConfig(device="cuda", gpus_per_node=4, address="auto"), 2, 1.0)
    assert bundles == [{"GPU": 1.0}] * 6
    with pytest.raises(ValueError, match="^cluster.num_nodes x cluster.gpus_per_node = 6 GPUs are asked for"):
        reserve(ClusterConfig(device="cuda", gpus_per_node=6), 0, 1.0)


def test_places_addresses_and_names_of_seats() -> None:
    seats = [seat("b", 1), seat("b", 2), seat("a", 0)]
    assert places(seats) == (Place(0, 1), Place(0, 2), Place(1, 0))
    assert places([seat("a", None)] * 2) == (Place(0, 0), Place(0, 1))
    assert (common_address(seats), common_address(seats[:2])) == ("address b", "127.0.0.1")
    assert (on_gpus(seats[:1]), on_gpus(seats[:2]), on_gpus([seat("a", None)])) == (" (GPU 1)", " (GPUs 1, 2)", "")
