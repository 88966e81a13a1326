"""Megatron-Core without CUDA and without Transformer Engine. For megatron-core 0.16.1, torch 2.11 to 2.13.

Without CUDA, `install()` puts an import hook in place that compiles the sources of megatron.core in memory with the
device strings, `.cuda()` calls, streams and generator calls rewritten (`RULES`); torch itself is not patched. The files
on disk and their .pyc files are left alone and line numbers stay, so tracebacks point at the installed source. A global
TorchFunctionMode would be shorter, but it is off during backward.

With CUDA only the fixes of upstream bugs that are there too are made: names missing without Transformer Engine, and two
of the checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import os
import queue
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

# ------------------------------------------------------------------------------------------------ the import hook


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(contextlib.AbstractContextManager["_Stream"]):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *args: Any) -> _Event:
        return _Event()

    def __exit__(self, *args: Any) -> None:
        return None


class CpuCuda:
    """What stands for torch.cuda in the rewritten sources: everything is done at once, on the CPU, and the CPU's
    default generator plays the CUDA one. Names not defined here (is_available, nvtx, ...) are torch.cuda's own."""

    Stream, Event = _Stream, _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, *args: Any) -> None: ...
    def empty_cache(self) -> None: ...
    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, stream: Any = None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def get_rng_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


_FACADE = "__megarl_cpu_cuda__"
_REPLACED = (
    "current_device|synchronize|empty_cache|current_stream|default_stream|stream|Stream|Event"
    "|get_rng_state|set_rng_state|manual_seed"
)
RULES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # x.cuda(...) -> x
        (r"\.cuda\((?:[^()]|\(\))*\)", ""),
        # param.type() == 'torch.cuda.FloatTensor'
        (r"""(['"])torch\.cuda\.(Half|BFloat16|Float)Tensor\1""", r"\1torch.\2Tensor\1"),
        (r"""device\s*=\s*(['"])cuda\1""", r"device=\1cpu\1"),
        (r"""torch\.device\((['"])cuda\1\)""", r"torch.device(\1cpu\1)"),
        # pinning needs a CUDA driver
        (r"pin_memory=True", "pin_memory=False"),
        (rf"(?<![\w.])torch\.cuda\.(?=(?:{_REPLACED})\b)", f"{_FACADE}."),
    )
)
_LEFT_ALONE = re.compile(r"^megatron\.core\.(inference|export|ssm|post_training|distributed\.fsdp)\b")


def rewrite(source: str) -> str:
    """A megatron.core source for the CPU; the number of lines stays the same."""
    for pattern, replacement in RULES:
        source = pattern.sub(replacement, source)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)  # get_code is where .pyc files would be read and written
        return compile(rewrite(self.get_data(path).decode()), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, _FACADE, _CPU_CUDA)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core") or _LEFT_ALONE.match(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


_CPU_CUDA = CpuCuda()
_installed = False


def install() -> None:
    """Make megatron.core importable and correct on this machine. The first call counts, later ones do nothing.

    Raises RuntimeError where there is no CUDA and megatron.core was imported before the first call."""
    global _installed
    if _installed:
        return
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron.core was imported before megarl.compat.megatron_cpu.install(): on a machine without CUDA its "
                "sources must be rewritten as they are imported; call install() first"
            )
        # Megatron's jit_fuser is torch.compile: 3 to 13 s a process for kernels that a CPU run never repays.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if "torch._dynamo.config" in sys.modules:  # it has read the environment already
            torch._dynamo.config.disable = True
        sys.meta_path.insert(0, _Finder())
    else:
        # Transformer Engine (2.10 and later) reads it once, at import: see megatron_offload.py.
        os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
    _installed = True
    fix_missing_transformer_engine()
    use_plain_checkpoint_queue()
    keep_bucket_padding_in_checkpoints()
    if on_cpu:
        use_cpu_generator()
        keep_dispatcher_splits_on_host()
        allow_uneven_gather()


# ------------------------------------------------------------------------------------------------ fixes after import


def fix_missing_transformer_engine() -> None:
    """Names that 0.16.1 uses but defines only where Transformer Engine is installed, on CPU and GPU alike:
    tensor_parallel/random.py (recompute without output) and moe_utils.py (the router's product) raise NameError."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    if not getattr(megatron_random, "HAVE_TE", False):
        megatron_random.FP8GlobalStateManager = type(
            "NoFP8", (), {"is_fp8_enabled": staticmethod(lambda: False), "get_fp8_recipe": staticmethod(lambda: None)}
        )
        megatron_random.activation_recompute_forward = lambda **kwargs: contextlib.nullcontext()
        megatron_random.fp8_autocast = lambda **kwargs: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def use_plain_checkpoint_queue() -> None:
    """dist_checkpointing (0.16.1) starts a multiprocessing manager by "spawn" in every rank for the results of a save.
    That imports __main__ again (4 to 13 s, for ever without a main guard) and its process outlives a killed rank. Our
    results are read in the same process, for which a queue is enough (engines/saving.py: of one save at a time)."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def results_queue() -> Any:
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = queue.Queue()
        return filesystem_async._results_queue

    filesystem_async._get_write_results_queue = results_queue


def keep_bucket_padding_in_checkpoints() -> None:
    """ "fully_reshardable" checkpoints of the distributed optimizer (0.16.1) are silently wrong where a gradient buffer
    has several buckets with padding between them (overlapped reduction, or tied embeddings with pipeline parallel): the
    gathered states leave that padding out, but are cut into parameters by offsets that count it, so that every state
    after the first padding is shifted. Count it in both."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    def with_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        sized = [
            (item, whole)
            for buffer in self.buffers
            for item, whole in [(buffer, buffer.numel), *((b, b.grad_data.numel()) for b in buffer.buckets)]
        ]
        unpadded = [item.numel_unpadded for item, _ in sized]
        try:
            for item, whole in sized:
                item.numel_unpadded = whole
            return original(self, *args, **kwargs)
        finally:
            for (item, _), size in zip(sized, unpadded, strict=True):
                item.numel_unpadded = size

    DistributedOptimizer.sharded_param_state_fully_reshardable = with_padding


def use_cpu_generator() -> None:
    """The tracker's helpers take torch.cuda.default_generators[...], which has no entry without CUDA (0.16.1). The
    warning that the CPU generator moved inside a fork is then always right, and pointless."""
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def keep_dispatcher_splits_on_host() -> None:
    """The all-to-all dispatcher (0.16.1) turns split sizes into host arrays only on their way from the GPU; on the CPU
    they stay tensors, which all_to_all_single refuses."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def allow_uneven_gather() -> None:
    """gloo has no all-gather of unequal parts, which the dispatcher uses with expert tensor parallel (0.16.1): pad to
    the longest part and cut."""
    from megatron.core.tensor_parallel import mappings

    even_gather = mappings._gather_along_first_dim

    def gather(
        part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            gathered: torch.Tensor = even_gather(part, group, output_split_sizes, use_global_buffer)
            return gathered
        sizes = [int(size) for size in output_split_sizes]
        longest = max(sizes)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        padded_parts = part.new_empty(longest * len(sizes), *part.shape[1:])
        torch.distributed.all_gather_into_tensor(padded_parts, padded, group=group)
        return torch.cat([padded_parts[rank * longest :][:size] for rank, size in enumerate(sizes)])

    mappings._gather_along_first_dim = gather


def use_adam_without_transformer_engine(adam: type[torch.optim.Optimizer]) -> None:
    """Where neither Transformer Engine nor Apex is installed, megatron-core 0.16.1 takes torch's AdamW, whose step
    counter is a state of each parameter; the distributed optimizer's checkpoints then share one counter among all
    parameters after loading. Give it `adam`, which keeps the step in the parameter group as Transformer Engine's does,
    so that there is one path for both."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distrib_optimizer.Adam = adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Two marks on the experts' parameters, whose lack makes megatron-core 0.16.1 silently wrong, on CPU and GPU alike.

    allreduce: with expert parallel 1 their gradients are reduced as dense ones, over the ranks with other data; where
    expert-tensor and tensor parallel differ, those are not the ranks that hold the same part of an expert.
    tensor_model_parallel: Transformer Engine's grouped experts lack it, so that the gradient norm counts those of
    tensor rank 0 only; no two ranks of a norm's group hold the same part of an expert."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
