"""Where Ray puts the processes: a trainer a GPU (or as many as asked for, without GPUs), sorted by node and device,
and the engine on the same GPUs or on GPUs of its own."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import ClusterConfig, Config
from megarl.reshard.plan import Place
from megarl.workers.calls import Callee, gather

TRAINER_SHARE, ENGINE_SHARE, RECEIVER_SHARE = 0.5, 0.4, 0.1
"""Of a GPU, in Ray's book-keeping: a trainer or a receiver shares it with the engine."""


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of processes that are all on one node."""


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


@dataclass(frozen=True)
class Placement:
    """Which bundles are whose; without GPUs, bare numbers of processes."""

    bundles: PlacementGroup | None
    trainers: tuple[int, ...]
    engine: tuple[int, ...]
    """The engine's own, in the order of its ranks; none where it shares the trainers' GPUs."""
    variables: dict[str, str]
    """Environment of every process of ours."""


def place(config: Config) -> Placement:
    """Reserve the GPUs of trainers and engine, and say which are whose.

    Raises:
        ValueError: there are too few of them, see `reserve`.
    """
    own, deadline = config.rollout.num_gpus, config.run.startup_deadline
    bundles = reserve(config.cluster, own, deadline)
    numbers = list(range(config.cluster.num_ranks + own))
    variables = environment(config.cluster)
    if bundles is not None and own:
        seats = _look(bundles, numbers, variables, deadline)
        numbers = [seat.bundle for seat in in_order(seats)]
        if len({seat.node for seat in seats}) > 1:
            variables = {name: value for name, value in variables.items() if name not in LOOPBACK}
    return Placement(bundles, tuple(numbers[: len(numbers) - own]), tuple(numbers[len(numbers) - own :]), variables)


def reserve(cluster: ClusterConfig, num_engine_gpus: int, deadline: float) -> PlacementGroup | None:
    """Hold one bundle a GPU; None without GPUs, where processes need no reservation.

    Raises:
        ValueError: Ray cannot give that many GPUs within the deadline; says what it has.
    """
    if not uses_gpus(cluster):
        return None
    wanted = f"cluster.num_nodes x cluster.gpus_per_node = {cluster.num_ranks}"
    wanted += f" and rollout.num_gpus = {num_engine_gpus} GPUs" if num_engine_gpus else " GPUs"
    total = cluster.num_ranks + num_engine_gpus
    have = ray.cluster_resources().get("GPU", 0)
    if cluster.address is None and have < total:  # nobody else will join the Ray that we started
        raise ValueError(
            f"{wanted} are asked for, but Ray sees {have:.0f} on this machine; lower them, or give cluster.address of "
            f"a larger Ray cluster"
        )
    group = placement_group([{"GPU": 1.0}] * total, strategy="PACK")
    if not group.wait(timeout_seconds=deadline):
        have = ray.cluster_resources().get("GPU", 0)
        raise ValueError(
            f"{wanted} are asked for, but Ray gave no {total} within {deadline:.0f} s; the cluster has {have:.0f}"
        )
    return group


def _look(bundles: PlacementGroup, numbers: Sequence[int], variables: dict[str, str], deadline: float) -> list[Seat]:
    """The seats of bundles, seen by a process in each that ends at once."""
    look = ray.remote(max_calls=1)(here)
    refs = []
    for number in numbers:
        options = actor_options(bundles, number, RECEIVER_SHARE, variables)
        options.pop("max_restarts")
        refs.append(look.options(**options).remote(number))
    seats: list[Seat] = gather(refs, [Callee(f"bundle {n}", "its node") for n in numbers], "looking at GPUs", deadline)
    return seats


def in_order(seats: Sequence[Seat]) -> list[Seat]:
    """By node, the one with most seats first, and GPU: trainers, which come first, are spread over few nodes, and the
    engine's ranks are neighbours."""
    counts = Counter(seat.node for seat in seats)
    return sorted(
        seats,
        key=lambda s: (-counts[s.node], s.node, s.gpu if s.gpu is not None else s.bundle, s.gpu_uuid, s.bundle),
    )


def places(seats: Sequence[Seat]) -> tuple[Place, ...]:
    """Each seat's place, for plans: those without a GPU count as one GPU each."""
    nodes = {node: i for i, node in enumerate(dict.fromkeys(seat.node for seat in seats))}
    return tuple(Place(nodes[s.node], number if s.gpu is None else s.gpu) for number, s in enumerate(seats))


def common_address(seats: Sequence[Seat]) -> str:
    """At which processes in all these seats reach the first one."""
    return "127.0.0.1" if len({seat.node for seat in seats}) == 1 else seats[0].address


def on_gpus(seats: Sequence[Seat]) -> str:
    """For errors, which GPUs of their host: " (GPU 4)", " (GPUs 4, 5)"; nothing without GPUs."""
    gpus = [str(seat.gpu) for seat in seats if seat.gpu is not None]
    return f" (GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)})" if gpus else ""


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
        variables |= LOOPBACK
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
