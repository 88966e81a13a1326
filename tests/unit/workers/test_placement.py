"""Where processes go and what their environment is, on a machine without GPUs."""

from __future__ import annotations

import socket

import pytest

from megarl.config import ClusterConfig
from megarl.workers.placement import actor_options, environment, free_port, reserve, uses_gpus

CPU = ClusterConfig(device="cpu", threads_per_rank=3)


def test_a_process_without_a_gpu_waits_for_no_resources() -> None:
    """Ray would let a process that asks for a CPU wait for ever on a machine with few."""
    assert not uses_gpus(CPU)
    assert reserve(CPU, 1.0) is None
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
