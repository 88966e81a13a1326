"""Process groups for each role. Megatron keeps one layout in module globals; roles here have one each.

A role's groups are built once by Megatron's own initialize_model_parallel, with every communicator that an earlier role
already has taken from a cache: a communicator costs memory on the GPU. `activate()` swaps the role's globals and random
state in; forward, backward (with recompute) and the optimizer run inside it.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarl.compat.megatron_cpu import install
from megarl.config import ParallelConfig
from megarl.parallel.topology import Coordinates, RankGrid

install()

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

# Scratch space for the gathers of sequence parallel: used within one call, so all roles share one.
_SHARED = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")

_groups: dict[tuple[Any, ...], Any] = {}
"""Every group made so far by this process, by (ranks, backend); NON_GROUP_MEMBER for those it is no part of."""


def _layout_globals() -> dict[str, Any]:
    """Megatron's globals that describe the layout."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper() and name not in _SHARED
    }


assert not parallel_state.model_parallel_is_initialized(), "the layout must be read before anybody initialises it"
_PRISTINE = _layout_globals()
_RNG_GLOBALS = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")


def _cached(new_group: Callable[..., Any], timeout: timedelta | None) -> Callable[..., Any]:
    def cached_new_group(ranks: list[int] | None = None, **kwargs: Any) -> Any:
        backend = kwargs.get("backend") or dist.get_backend()
        key = (tuple(sorted(ranks)) if ranks is not None else None, str(backend))  # as new_group sorts them
        if key not in _groups:
            # Communicator options differ by name only (see initialize_model_parallel's nccl_communicator_config_path,
            # which we do not use), so the first one made serves all.
            _groups[key] = new_group(ranks, **(kwargs | ({"timeout": timeout} if timeout else {})))
        return _groups[key]

    return cached_new_group


@dataclass
class RoleGroups:
    """One role's place in the grid and its process groups. Make it with `build`."""

    parallel: ParallelConfig
    grid: RankGrid
    rank: int
    _state: dict[str, Any]
    _rng: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, parallel: ParallelConfig, seed: int = 1, timeout: float | None = None) -> RoleGroups:
        """Collective over all ranks: every rank builds every role, in the same order.

        seed: of the role's random trackers. timeout: seconds after which a collective of a group made here fails; None:
        torch's default (30 minutes for gloo, 10 for NCCL). A group that an earlier role made keeps the earlier timeout.

        Raises ValueError when the sizes do not divide the world."""
        grid = RankGrid(dist.get_world_size(), parallel)
        limit = timedelta(seconds=timeout) if timeout is not None else None
        with _swapped(_PRISTINE, dict.fromkeys(_RNG_GLOBALS)) as (state, rng):
            shared = {name: getattr(parallel_state, name, None) for name in _SHARED}
            for name in shared:
                setattr(parallel_state, name, None)  # initialize_model_parallel insists on making them
            with mock.patch.object(torch.distributed, "new_group", _cached(dist.new_group, limit)):
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=parallel.tensor,
                    pipeline_model_parallel_size=parallel.pipeline,
                    virtual_pipeline_model_parallel_size=(
                        parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
                    ),
                    context_parallel_size=parallel.context,
                    expert_model_parallel_size=parallel.expert,
                    expert_tensor_parallel_size=parallel.expert_tensor,
                )
            for name, value in shared.items():
                if value is not None:
                    setattr(parallel_state, name, value)
            megatron_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        return cls(parallel, grid, dist.get_rank(), state, rng)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Megatron's globals and random trackers are this role's inside, and what they were before afterwards. Changes
        that are made inside (random states move on) are the role's. May be nested, also for different roles."""
        with _swapped(self._state, self._rng) as (state, rng):
            yield
        self._state, self._rng = state, rng

    @property
    def coordinates(self) -> Coordinates:
        return self.grid.coordinates(self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pipeline == self.parallel.pipeline - 1

    @property
    def tensor(self) -> dist.ProcessGroup:
        return self._group("_TENSOR_MODEL_PARALLEL_GROUP")

    @property
    def pipeline(self) -> dist.ProcessGroup:
        return self._group("_PIPELINE_MODEL_PARALLEL_GROUP")

    @property
    def context(self) -> dist.ProcessGroup:
        return self._group("_CONTEXT_PARALLEL_GROUP")

    @property
    def data(self) -> dist.ProcessGroup:
        return self._group("_DATA_PARALLEL_GROUP")

    @property
    def data_and_context(self) -> dist.ProcessGroup:
        return self._group("_DATA_PARALLEL_GROUP_WITH_CP")

    def _group(self, name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup | None = self._state[name]
        assert group is not None, f"Megatron made no {name}"
        return group


@contextlib.contextmanager
def _swapped(state: dict[str, Any], rng: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Put layout and random trackers in; give two dicts that are filled, on the way out, with what they then are."""
    outside = _layout_globals()
    outside_rng = {name: getattr(megatron_random, name) for name in _RNG_GLOBALS}
    after: dict[str, Any] = {}
    after_rng: dict[str, Any] = {}
    _set(parallel_state, state)
    _set(megatron_random, rng)
    try:
        yield after, after_rng
    finally:
        after.update(_layout_globals())
        after_rng.update({name: getattr(megatron_random, name) for name in _RNG_GLOBALS})
        _set(parallel_state, outside)
        _set(megatron_random, outside_rng)


def _set(module: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
