"""Gradients' buffers and the optimizer of one role: Megatron's DistributedDataParallel and DistributedOptimizer."""

# ruff: noqa: E402
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megarl.compat.megatron_cpu import install, use_adam_without_transformer_engine
from megarl.config import OptimizerConfig

install()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.module import MegatronModule

from megarl.model.hf_config import DTYPES, Precision
from megarl.parallel import device

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam with the semantics of Transformer Engine's FusedAdam, by torch's fused kernel, on CPU and GPU.

    The step is kept in the parameter group and not in each parameter's state: so Megatron takes the same way through
    its distributed optimizer and its checkpoints wherever it runs. adam_w_mode: decoupled weight decay
    (arXiv:1711.05101)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self._state_of(parameter) for parameter in parameters]
            # The kernel reads the step as one tensor a parameter; it does not count by itself.
            steps = [torch.full((), float(group["step"]), device=parameter.device) for parameter in parameters]
            kernel(
                [parameter.data for parameter in parameters],
                [parameter.grad.to(parameter.dtype) for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter.data, dtype=torch.float32)
        return state


def wrap_for_gradients(
    chunks: Sequence[MegatronModule], optimizer: OptimizerConfig, num_copies: int
) -> list[DistributedDataParallel]:
    """The chunks with float32 gradient buffers that are summed (not averaged) over data and context parallel ranks, of
    which there are `num_copies`; alone, there is nothing to overlap.

    For adam each rank keeps an equal part of the summed gradient. Sets the hooks that Megatron's schedules call in the
    chunks' shared configuration."""
    config = chunks[0].config
    overlap_grad_reduce = optimizer.overlap_grad_reduce and num_copies > 1
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.kind == "adam",
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather and num_copies > 1,
    )
    wrapped = [
        # Buckets are for overlap with the backward pass of the first chunk; later ones have time enough.
        DistributedDataParallel(config=config, ddp_config=settings, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = _finalize_gradients
    if overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _finalize_gradients(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's own, without the division by the number of tokens: our losses come divided."""
    finalize_model_grads(model, None, **kwargs)


def finish_param_gather(chunks: Iterable[Any]) -> None:
    """Every parameter is current afterwards: what overlap_param_gather left for the next forward pass is collected now.
    The first call after a step is collective; later ones, and all without the option, do nothing."""
    for chunk in chunks:
        if _gathers_late(chunk):
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def finish_param_gather_of(chunk: Any, parameter: torch.Tensor) -> None:
    """The same for one parameter, that is used without calling the module that holds it: Megatron hooks into calls."""
    if _gathers_late(chunk):
        chunk.param_to_bucket_group[parameter].finish_param_sync()


def _gathers_late(chunk: Any) -> bool:
    return isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, precision: Precision
) -> ChainedOptimizer:
    """Collective over all ranks; call it with the role's groups active.

    Adam is distributed: each data-parallel rank keeps and updates an equal part of the float32 main parameters and both
    moments. SGD has no momentum and is replicated. Weight decay leaves out biases and norms; Adam's is decoupled.

    Raises ValueError for bf16 moments where Transformer Engine's Adam, which alone has them, is not."""
    use_adam_without_transformer_engine(FusedAdam)
    narrow = config.state_precision == "bf16"
    if narrow and not (device.is_cuda() and HAVE_TE and precision == "bf16"):
        raise ValueError(
            f"optimizer.state_precision bf16 needs a GPU ({device.name()} here), Transformer Engine "
            f"({'found' if HAVE_TE else 'not found'}) and model.precision bf16 (it is {precision}); set it to fp32"
        )
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=config.kind,
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            sgd_momentum=0.0,
            clip_grad=config.clip_grad,
            bf16=precision == "bf16",
            params_dtype=DTYPES[precision],
            use_distributed_optimizer=config.kind == "adam",
            use_precision_aware_optimizer=narrow,
            # Whole float32 main parameters: their lower halves alone would tie a checkpoint to the bf16 weights.
            store_param_remainders=False,
            exp_avg_dtype=torch.bfloat16 if narrow else torch.float32,
            exp_avg_sq_dtype=torch.bfloat16 if narrow else torch.float32,
        ),
        list(chunks),
    )
    for inner in optimizer.chained_optimizers:
        if inner.init_state_fn is None:  # SGD without momentum: loading a checkpoint calls it all the same (0.16.1)
            inner.init_state_fn = lambda *unused: None
    return optimizer


def make_states(optimizer: ChainedOptimizer) -> None:
    """The moments of parameters that had no step yet, zeros: Adam makes them in its first step, and a checkpoint holds
    them all."""
    for inner in optimizer.chained_optimizers:
        narrow = inner.config.use_precision_aware_optimizer
        for parameter in (p for group in inner.optimizer.param_groups for p in group["params"]):
            state = inner.optimizer.state[parameter]
            if inner.config.optimizer == "adam" and not state and narrow:
                inner.optimizer.initialize_state(parameter, store_param_remainders=False)
            elif inner.config.optimizer == "adam" and not state:
                state |= {name: torch.zeros_like(parameter.data, dtype=torch.float32) for name in MOMENTS}


def reload_main_parameters(optimizer: ChainedOptimizer) -> None:
    """The model's parameters were overwritten: make the optimizer's float32 main parameters equal to them."""
    with torch.no_grad():
        optimizer.reload_model_params()
        for inner in optimizer.chained_optimizers:
            if not inner.config.use_precision_aware_optimizer:
                continue
            # Transformer Engine's Adam keeps these, from its first step on, and Megatron (0.16.1) leaves them alone.
            for parameter in (p for group in inner.optimizer.param_groups for p in group["params"]):
                if inner.optimizer.state[parameter]:
                    inner.optimizer.set_scaled_state(parameter, "master_param", parameter.detach().float())


def apply_gradients(optimizer: ChainedOptimizer, config: OptimizerConfig, lr: float) -> tuple[float, bool]:
    """One update with the gradients that lie in the buffers, clipped by their global norm.

    Returns (global L2 norm before clipping, True), or (the norm, False) when the norm is not finite: then nothing is
    changed, on any rank, because all ranks have the same norm."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        # The multiplier (0 for biases and norms) is applied by Megatron's scheduler, which we do not use.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    has_overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    applied = not has_overflow and math.isfinite(norm)
    if applied:
        _clip(optimizer, config.clip_grad, norm)
        applied = optimizer.step_with_ready_grads()
    optimizer.zero_grad()
    return norm, applied


def _clip(optimizer: ChainedOptimizer, clip_grad: float, norm: float) -> None:
    """Scale all gradients so that their global norm is at most clip_grad; 0 turns it off."""
    scale = clip_grad / (norm + 1e-6)
    if clip_grad <= 0 or scale >= 1:
        return
    # With bf16 moments Megatron keeps the float32 gradients of bf16 parameters in `decoupled_grad`.
    # Experts have an optimizer of their own.
    parameters = (parameter for inner in optimizer.chained_optimizers for parameter in inner.get_parameters())
    found = (getattr(parameter, "decoupled_grad", parameter.grad) for parameter in parameters)
    gradients = [gradient for gradient in found if gradient is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)
