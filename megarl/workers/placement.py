"""Where Ray puts the trainer processes: one a GPU (or as many as asked for, without GPUs), sorted by node and
device."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import ClusterConfig

TRAINER_SHARE, ENGINE_SHARE = 0.5, 0.4
"""Of a GPU, in Ray's book-keeping: both kinds of process share it."""


@dataclass(frozen=True)
class Seat:
    """Where a process sits: its node, its GPU (None without), and the bundle of the placement group."""

    node: str
    host: str
    address: str
    gpu: int | None
    gpu_uuid: str
    bundle: int


def uses_gpus(cluster: ClusterConfig) -> bool:
    return cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())


def reserve(cluster: ClusterConfig, deadline: float) -> PlacementGroup | None:
    """Hold one bundle a GPU; None without GPUs, where processes need no reservation.

    Raises:
        ValueError: Ray cannot give that many GPUs within the deadline; says what it has.
    """
    if not uses_gpus(cluster):
        return None
    have = ray.cluster_resources().get("GPU", 0)
    if cluster.address is None and have < cluster.num_ranks:  # nobody else will join the Ray that we started
        raise ValueError(
            f"cluster.gpus_per_node x cluster.num_nodes = {cluster.num_ranks} GPUs, but Ray sees {have:.0f} on this "
            f"machine; lower them, or give cluster.address of a larger Ray cluster"
        )
    group = placement_group([{"GPU": 1.0}] * cluster.num_ranks, strategy="PACK")
    if not group.wait(timeout_seconds=deadline):
        have = ray.cluster_resources().get("GPU", 0)
        raise ValueError(
            f"Ray gave no {cluster.num_ranks} GPUs within {deadline:.0f} s; the cluster has {have:.0f} "
            f"(cluster.num_nodes, cluster.gpus_per_node)"
        )
    return group


def actor_options(
    group: PlacementGroup | None, bundle: int, share: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Ray's options for a process in a bundle. No CPUs are asked for: a machine with few would wait for ever."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": environment}}
    if group is not None:
        options["num_gpus"] = share
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return options


def environment(cluster: ClusterConfig) -> dict[str, str]:
    """Environment of every process of ours that Ray starts."""
    variables = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compiler processes costs more than our few kernels
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Every process sees all GPUs and takes its own by number: NCCL and CUDA IPC then find their peers.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    if not uses_gpus(cluster):
        variables["CUDA_VISIBLE_DEVICES"] = ""  # cluster.device=cpu on a machine with GPUs
        variables["OMP_NUM_THREADS"] = str(cluster.threads_per_rank)
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if cluster.num_nodes == 1:
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return variables | {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "NCCL_NVLS_ENABLE", "NCCL_DEBUG")}


def here(bundle: int) -> Seat:
    """The seat of the calling process."""
    context = ray.get_runtime_context()
    gpus = ray.get_gpu_ids()
    gpu = torch_device(gpus[0], os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus and torch.cuda.is_available() else None
    uuid = str(torch.cuda.get_device_properties(gpu).uuid) if gpu is not None else ""
    return Seat(context.get_node_id(), socket.gethostname(), ray.util.get_node_ip_address(), gpu, uuid, bundle)


def torch_device(ray_id: int | str, visible: str | None) -> int:
    """torch's number of the GPU that Ray calls `ray_id`: Ray names GPUs as CUDA_VISIBLE_DEVICES does, torch counts them
    from 0. torch_device(5, "4,5") == 1"""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return names.index(str(ray_id)) if str(ray_id) in names else int(ray_id)


def free_port(address: str) -> int:
    """A port that is free on this node at the moment."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
