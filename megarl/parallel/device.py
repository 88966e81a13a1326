"""The device of this process. The one place that asks whether there is CUDA: everything else asks here."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch


def is_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """Where this process keeps its tensors: the current CUDA device (see `set_device`), or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def backend() -> str:
    """What torch.distributed.init_process_group takes."""
    return "nccl" if is_cuda() else "gloo"


def set_device(local_rank: int) -> None:
    """Bind this process to the CUDA device of that number; without CUDA nothing is to be bound.

    Raises ValueError when there is no such device."""
    if not is_cuda():
        return
    if not 0 <= local_rank < torch.cuda.device_count():
        raise ValueError(f"local rank {local_rank} has no device: this process sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)


def name() -> str:
    """The GPU's name, "cpu" without one."""
    return torch.cuda.get_device_name() if is_cuda() else "cpu"


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if is_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give back to the driver what torch's allocator keeps but does not use."""
    if is_cuda():
        torch.cuda.empty_cache()


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Host memory, uint8, that the device copies to and from at full speed; ordinary memory without CUDA.

    It is locked in place: torch's own allocator of pinned memory rounds up to a power of two, up to twice the size.

    Raises RuntimeError when the memory cannot be locked."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if is_cuda() and num_bytes:
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error:
            raise RuntimeError(f"cannot lock {num_bytes / 2**30:.1f} GiB of host memory: CUDA error {error}")
        # The pages must be unlocked before they are given back; at the end of the process the driver does it.
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes. `free` and `total` count the whole device, other processes, NCCL and cuBLAS included; None on the CPU."""

    allocated: int
    max_allocated: int
    reserved: int
    max_reserved: int
    free: int | None
    total: int | None

    @property
    def used_gb(self) -> float | None:
        """Of the whole device, in GB (1e9 bytes); None on the CPU."""
        return None if self.free is None or self.total is None else (self.total - self.free) / 1e9


def memory_statistics() -> MemoryStatistics:
    """Of this process's allocator, and of the device as the driver sees it; zeros and None on the CPU."""
    if not is_cuda():
        return MemoryStatistics(0, 0, 0, 0, None, None)
    free, total = torch.cuda.mem_get_info()
    return MemoryStatistics(
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_reserved(),
        free,
        total,
    )


def reset_peak_memory() -> None:
    """Start `max_allocated` and `max_reserved` anew."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
