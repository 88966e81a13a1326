"""What of a role lies on the GPU. While a role is idle its parameters, gradients and optimizer states can leave: whole
flat storages, to pinned host memory, in place: every tensor object stays valid and has its content again after
`resume`.

Captured graphs and IPC handles must not refer to these storages: their address changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Literal, get_args

import torch

from megarl.parallel.device import empty_cache, is_cuda, synchronize

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
        self._released: dict[Kind, list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]]] = {}
        self._host: dict[tuple[Kind, int], torch.Tensor] = {}

    def is_released(self, kind: Kind) -> bool:
        return kind in self._released

    def release(self, kinds: Collection[Kind] = KINDS) -> None:
        """Free the device memory of these kinds; those already released are left alone."""
        if not self.enabled:
            return
        for kind in kinds:
            if kind in self._released:
                continue
            moved = []
            for number, storage in enumerate(self._storages(kind)):
                size = storage.nbytes()
                host = None if kind == "gradients" else self._host_copy(kind, number, storage)
                moved.append((storage, size, host))
            synchronize()  # the copies must have ended before their source is freed
            for storage, _, _ in moved:
                storage.resize_(0)
            self._released[kind] = moved
        empty_cache()

    def resume(self, kinds: Collection[Kind] = KINDS) -> None:
        """Bring these kinds back; those that are here are left alone."""
        for kind in kinds:
            for storage, size, host in self._released.pop(kind, []):
                storage.resize_(size)
                if host is None:
                    storage.fill_(0)
                else:
                    storage.copy_(host, non_blocking=True)
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
            taken |= {s._cdata for s, _, _ in self._released.get(earlier, [])}
            taken |= {tensor.untyped_storage()._cdata for tensor in self.tensors_of[earlier]()}
        found: list[torch.UntypedStorage] = []
        for tensor in self.tensors_of[kind]():
            storage = tensor.untyped_storage()
            if storage._cdata not in taken and storage.nbytes():
                taken.add(storage._cdata)
                found.append(storage)
        return found

    def _host_copy(self, kind: Kind, number: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The content in host memory that is pinned once and kept: pinning takes longer than copying."""
        key = (kind, number)
        held = self._host.get(key)
        if held is None or held.numel() != storage.nbytes():
            held = self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda())
        host = held.untyped_storage()
        host.copy_(storage, non_blocking=True)
        return host
