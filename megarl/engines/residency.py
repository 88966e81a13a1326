"""What of a role lies on the GPU. While a role is idle its parameters, gradients and optimizer states can leave: whole
flat storages, to pinned host memory, in place: every tensor object stays valid and has its content again after
`resume`.

Captured graphs and IPC handles must not refer to these storages: their address changes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Literal, get_args

import torch

from megarl.parallel.device import empty_cache, is_cuda, pinned_memory, synchronize

Kind = Literal["parameters", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def flatten(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Move parameters into one storage for each dtype, as Megatron's gradient buffers do for a role that trains."""
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, group in by_dtype.items():
        flat = torch.empty(sum(p.numel() for p in group), dtype=dtype, device=group[0].device)
        start = 0
        for parameter in group:
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            start += parameter.numel()


class Residency:
    """Moves one role's storages. On the CPU, or with `enabled` false, nothing moves.

    tensors_of: for each kind, a function that lists the tensors whose storages belong to it; it is asked at every
    release, because an optimizer makes its states at the first step. Gradients are not copied: they come back as zeros.
    """

    def __init__(
        self, tensors_of: dict[Kind, Callable[[], Iterable[torch.Tensor]]], enabled: bool | None = None
    ) -> None:
        self.tensors_of = tensors_of
        self.enabled = is_cuda() if enabled is None else enabled
        self._released: dict[Kind, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[Kind, torch.Tensor] = {}

    def is_released(self, kind: Kind) -> bool:
        return kind in self._released

    def release(self, kinds: Collection[Kind] = KINDS) -> None:
        """Free the device memory of these kinds; those already released are left alone."""
        if not self.enabled:
            return
        for kind in kinds:
            if kind in self._released:
                continue
            moved = [(storage, storage.nbytes()) for storage in self._storages(kind)]
            if kind != "gradients":
                for host, (storage, _) in zip(self._host_slices(kind, moved), moved, strict=True):
                    host.copy_(_bytes(storage), non_blocking=True)
            synchronize()  # the copies must have ended before their source is freed
            for storage, _ in moved:
                storage.resize_(0)
            self._released[kind] = moved
        empty_cache()

    def resume(self, kinds: Collection[Kind] = KINDS) -> None:
        """Bring these kinds back; those that are here are left alone."""
        for kind in kinds:
            moved = self._released.pop(kind, [])
            for storage, size in moved:
                storage.resize_(size)
            if kind == "gradients":
                for storage, _ in moved:
                    _bytes(storage).zero_()
            else:
                for host, (storage, _) in zip(self._host_slices(kind, moved), moved, strict=True):
                    _bytes(storage).copy_(host, non_blocking=True)
        if self.enabled:
            synchronize()

    @contextlib.contextmanager
    def resident(self, kinds: Collection[Kind] = KINDS) -> Iterator[None]:
        """These kinds are on the device inside; those that were not leave again."""
        absent = [kind for kind in kinds if kind in self._released]
        self.resume(absent)
        try:
            yield
        finally:
            self.release(absent)

    def _storages(self, kind: Kind) -> list[torch.UntypedStorage]:
        """The kind's storages, each once, without those of an earlier kind: in float32 the optimizer's main parameters
        are the parameters themselves."""
        taken: set[int] = set()
        for earlier in KINDS[: KINDS.index(kind)]:
            taken |= {tensor.untyped_storage()._cdata for tensor in self.tensors_of[earlier]()}
        found: list[torch.UntypedStorage] = []
        for tensor in self.tensors_of[kind]():
            storage = tensor.untyped_storage()
            if storage._cdata not in taken and storage.nbytes():
                taken.add(storage._cdata)
                found.append(storage)
        return found

    def _host_slices(self, kind: Kind, moved: list[tuple[torch.UntypedStorage, int]]) -> Iterator[torch.Tensor]:
        """Parts of one flat buffer for each kind, which is locked once and kept: locking takes longer than copying."""
        ends = list(itertools.accumulate((size for _, size in moved), initial=0))
        if kind not in self._host or self._host[kind].numel() < ends[-1]:
            self._host.pop(kind, None)
            self._host[kind] = pinned_memory(ends[-1])
        return (self._host[kind][start:end] for start, end in itertools.pairwise(ends))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
