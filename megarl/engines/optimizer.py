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
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.module import MegatronModule

from megarl.model.hf_config import DTYPES, Precision


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
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter.data, dtype=torch.float32)
        return state


def wrap_for_gradients(
    chunks: Sequence[MegatronModule], distributed: bool, overlap_grad_reduce: bool
) -> list[DistributedDataParallel]:
    """The chunks with float32 gradient buffers that are summed (not averaged) over data and context parallel ranks.

    distributed: each rank keeps an equal part of the summed gradient, for the distributed optimizer. Sets the hooks
    that Megatron's schedules call in the chunks' shared configuration."""
    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap_grad_reduce
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


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, precision: Precision
) -> ChainedOptimizer:
    """Collective over all ranks; call it with the role's groups active.

    Adam is distributed: each data-parallel rank keeps and updates an equal part of the float32 main parameters and both
    moments. SGD has no momentum and is replicated. Weight decay is decoupled and leaves out biases and norms."""
    use_adam_without_transformer_engine(FusedAdam)
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
        ),
        list(chunks),
    )
    for inner in optimizer.chained_optimizers:
        if inner.init_state_fn is None:  # SGD without momentum: loading a checkpoint calls it all the same (0.16.1)
            inner.init_state_fn = lambda *unused: None
    return optimizer


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
    gradients = [parameter.grad for parameter in optimizer.get_parameters() if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)
