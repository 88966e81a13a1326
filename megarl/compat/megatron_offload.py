"""Fine-grained activation offloading of Megatron-Core 0.16.1 where passes differ from one another.

Megatron keeps one manager for the process. In the first training pass it records which groups of tensors each
micro-batch has, and expects every later pass to repeat them. Here roles take turns, forward-only passes come between,
and the number of micro-batches changes, so that it would reload another pass's groups. Each pass gets a manager of its
own instead, in the state of the first pass, which offloads and reloads everything; one without backward gets a manager
that does nothing.
"""

from __future__ import annotations


def leaves_weights() -> bool:
    """Whether Transformer Engine marks its weights as not to be offloaded: from 2.10 on only with NVTE_CPU_OFFLOAD_V1
    set to 1, as `megatron_cpu.install` does unless the environment says otherwise."""
    from transformer_engine.pytorch import cpu_offload

    return bool(getattr(cpu_offload, "NVTE_CPU_OFFLOAD_V1", True))


def begin_pass(has_backward: bool) -> None:
    """Before the schedule of a role with activation offloading runs."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    manager = offload.PipelineOffloadManager
    # At the end of a first pass: marks groups for the second, and prints a table that it gathers from all ranks.
    manager.post_warmup_callback = lambda self: None
    # It would empty the allocator's cache at every pass; the tensors go without it too.
    offload.GPUTensorPool.__del__ = lambda self: None
    manager.reset_instance()
    manager.get_instance()._is_warmup = has_backward
