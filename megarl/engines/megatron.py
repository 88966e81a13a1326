"""One role under Megatron-Core: log-probs or values of packed micro-batches, one optimizer step over them, checkpoints.

The way from a batch to the gradient: `train_step` -> Megatron's schedule -> `_forward_step` -> the model ->
`_token_outputs` -> the loss function that was passed in.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megarl.compat.megatron_checkpoint import write_in_threads
from megarl.compat.megatron_cpu import install
from megarl.compat.megatron_offload import begin_pass
from megarl.config import OptimizerConfig, ParallelConfig, RecomputeConfig
from megarl.data.packing import PackedBatch, join_zigzag, pack, split_zigzag
from megarl.engines.residency import KINDS, Kind, Residency, flatten
from megarl.engines.saving import PendingSave
from megarl.engines.stored import Stored, is_stored, read_stored
from megarl.parallel.device import device, is_cuda
from megarl.parallel.groups import RoleGroups
from megarl.parallel.vocab import DEFAULT_CHUNK_SIZE, fused_logprobs, vocab_parallel_logprobs
from megarl.types import FloatArray

install()
write_in_threads()

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.engines.optimizer import (
    apply_gradients,
    build_optimizer,
    finish_param_gather,
    finish_param_gather_of,
    make_states,
    reload_main_parameters,
    wrap_for_gradients,
)
from megarl.model.families import VALUE_ROLES
from megarl.model.gpt import build_model, local_parameters, unwrapped, uses_fused_norms
from megarl.model.hf_config import FORWARD_ONLY_ROLES, VOCAB_MULTIPLE, Precision, Role, padded_vocab_size

SHARDING = {
    # Resharded freely between layouts; the cheaper one ("dp_reshardable") only between data-parallel sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of each token of this context-parallel rank's part: float32 [T], differentiable.

    At a position: the log-probability of its target (at the temperature that was passed), the entropy of that
    distribution in nats, the critic's value."""

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """What the loss needs of a micro-batch: this context-parallel rank's part, on the device."""

    mask: torch.Tensor  # [T], bool
    per_token: Mapping[str, torch.Tensor]  # each float32 [T]


LossFunction = Callable[[TokenOutputs, TokenBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(outputs, batch) -> (loss, sums). The loss is a scalar already divided by global counts (the divisors lie in
per_token): gradients are summed over micro-batches, data and context parallel ranks. `sums` are scalars to be added up
likewise; they have the same names for every micro-batch."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    sums: dict[str, float]
    """The loss function's sums, over all micro-batches of all ranks."""
    grad_norm: float
    """Global L2 norm before clipping."""
    applied: bool
    """False: the norm was not finite and nothing was changed."""


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch on the device: this context-parallel rank's part, the same on all tensor and pipeline ranks."""

    number: int
    tokens: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    targets: torch.Tensor  # [T]
    packed: PackedSeqParams
    loss: TokenBatch


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """Python's collector does not run within: it would stop for tens of milliseconds the process that feeds the GPU."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class MegatronEngine:
    """One role's model, and its optimizer if it trains. Construction and every method are collective over all ranks.

    Several roles with different sizes live in the same processes; each call runs with the role's own process groups.

    Args:
        role: "actor" and "reference" give log-probs, "critic" and "reward_model" give values; the reference and the
            reward model have no gradients.
        hf_config: a transformers configuration (llama, qwen2, qwen3, qwen3_moe, mistral without sliding window).
        parallel: the role's sizes.
        precision: of parameters and activations; with bf16 the optimizer keeps float32 main parameters.
        optimizer: None: the role does not train.
        recompute: of activations in backward.
        offload_activations: modules of each layer whose saved activations wait for backward in host memory.
        seed: of the random initial weights and the role's random trackers.
        timeout: seconds after which a collective of the role's groups fails; None: torch's default.
        chunk_size: tokens whose logits are held in float32 at once.
        fused_output: never hold the logits of more than a chunk of tokens, at the price of one more product with the
            output weight in backward. Forward-only passes are always fused: there it costs nothing.
        compiles: do the arithmetic over the vocabulary in kernels of our own, on a GPU.

    Raises ValueError when the model cannot be expressed or the sizes do not divide it or the world."""

    def __init__(
        self,
        role: Role,
        hf_config: Any,
        parallel: ParallelConfig,
        precision: Precision = "bf16",
        optimizer: OptimizerConfig | None = None,
        recompute: RecomputeConfig | None = None,
        offload_activations: Sequence[str] = (),
        seed: int = 1,
        timeout: float | None = None,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        fused_output: bool = True,
        compiles: bool = True,
    ) -> None:
        if role in FORWARD_ONLY_ROLES and optimizer is not None:
            raise ValueError(f"the {role} does not train; give it no optimizer")
        self.role = role
        self.hf_config = hf_config
        self.parallel = parallel
        self.precision = precision
        self.optimizer_config = optimizer
        self.chunk_size = chunk_size
        self.fused_output = fused_output
        self.compiles = compiles and is_cuda()
        self.offloads_activations = bool(offload_activations)
        self.groups = RoleGroups.build(parallel, seed, timeout)
        self.optimizer = None
        with self.groups.activate():
            self.chunks: list[Any] = list(
                build_model(hf_config, role, parallel, precision, recompute, offload_activations)
            )
            if optimizer is not None:
                self.chunks = list(wrap_for_gradients(self.chunks, optimizer, self.groups.data_and_context.size()))
                self.optimizer = build_optimizer(self.chunks, optimizer, precision)
            else:
                flatten(parameter for chunk in self.chunks for parameter in chunk.parameters())
        self.residency = Residency(
            {
                "parameters": lambda: self._parameter_tensors(),
                "gradients": lambda: self._gradient_tensors(),
                "optimizer": lambda: self._optimizer_tensors(),
            }
        )

    # -------------------------------------------------------------------------------------------- computing

    def forward(
        self, micro_batches: Sequence[PackedBatch], temperature: float = 1.0, with_entropy: bool = False
    ) -> list[dict[str, FloatArray]]:
        """Per-token outputs without gradients: for each micro-batch, in order, {"logprobs": [T]} (and "entropy"), or
        {"values": [T]} with a value head, in the batch's own token order; numbers at padding mean nothing.

        All ranks of one copy of the model pass the same micro-batches and get the same result; ranks with other data
        pass others, and may pass another number of them."""
        names = self._output_names(with_entropy)
        dummies = self._dummies_for_experts(len(micro_batches))

        def keep(outputs: TokenOutputs, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            stacked = torch.stack([getattr(outputs, name) for name in names])
            return stacked.new_zeros(()), {"outputs": stacked}

        with self.groups.activate(), torch.no_grad(), _garbage_waits():
            for chunk in self.chunks:
                chunk.eval()
            kept = self._run_schedule([*micro_batches, *dummies], keep, temperature, with_entropy, forward_only=True)
            local_lengths = [batch.num_tokens // self.parallel.context for batch in micro_batches]
            flat = torch.empty(len(names), sum(local_lengths), dtype=torch.float32, device=device())
            if self.groups.is_last_stage:
                torch.cat([kept[number]["outputs"] for number in range(len(micro_batches))], dim=1, out=flat)
            of_rank = self._share_outputs(flat)
        parts = [np.split(part, np.cumsum(local_lengths)[:-1], axis=1) for part in of_rank]
        return [
            {
                name: join_zigzag([part[number][row] for part in parts], batch.cu_seqlens)
                for row, name in enumerate(names)
            }
            for number, batch in enumerate(micro_batches)
        ]

    def train_step(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: LossFunction,
        lr: float,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> StepResult:
        """One optimizer step over the micro-batches of this rank's copy of the model; see `LossFunction`.

        The number of micro-batches is the same on all ranks, and a multiple of the pipeline size with virtual pipeline.

        Raises ValueError when the role has no optimizer or the micro-batches do not fit the layout."""
        if self.optimizer is None or self.optimizer_config is None:
            raise ValueError(f"the {self.role} was built without an optimizer, so it cannot train")
        with self.groups.activate(), _garbage_waits():
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            kept = self._run_schedule(micro_batches, loss, temperature, with_entropy, forward_only=False)
            names, totals = self._sum_over_ranks([kept[number] for number in sorted(kept)])
            grad_norm, applied = apply_gradients(self.optimizer, self.optimizer_config, lr)
            # Read last: reading waits for the GPU, and meanwhile nothing would be sent to it.
            sums = dict(zip(names, totals.tolist(), strict=True))
        return StepResult(sums, grad_norm, applied)

    def _dummies_for_experts(self, count: int) -> list[PackedBatch]:
        """What this rank adds to its own micro-batches in a forward pass. Ranks with other data exchange tokens with
        this one where they share experts, so all of them run as many."""
        if self.parallel.expert * self.parallel.expert_tensor == 1:
            return []
        largest = torch.tensor(count, device=device())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.groups.data)
        return [pack([], multiple=self.parallel.sequence_multiple)] * (int(largest) - count)

    def _run_schedule(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: LossFunction,
        temperature: float,
        with_entropy: bool,
        forward_only: bool,
    ) -> dict[int, Mapping[str, torch.Tensor]]:
        """Send the micro-batches through Megatron's pipeline schedule. Gives, on the last stage, the loss function's
        sums for each micro-batch; nothing elsewhere."""
        if not micro_batches:
            raise ValueError("there are no micro-batches; a rank without samples passes a dummy one")
        if self.parallel.virtual_pipeline > 1 and len(micro_batches) % self.parallel.pipeline:
            raise ValueError(
                f"{len(micro_batches)} micro-batches do not divide by pipeline {self.parallel.pipeline}, as "
                f"virtual_pipeline {self.parallel.virtual_pipeline} needs; add dummy ones"
            )
        for chunk in self.chunks:
            unwrapped(chunk).stops_at_hidden = self.role not in VALUE_ROLES and (self.fused_output or forward_only)
        prepared = [self._prepare(number, batch) for number, batch in enumerate(micro_batches)]
        kept: dict[int, Mapping[str, torch.Tensor]] = {}
        forward_step = partial(
            self._forward_step, kept=kept, loss=loss, temperature=temperature, with_entropy=with_entropy
        )
        if self.offloads_activations:
            begin_pass(has_backward=not forward_only)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(prepared) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(prepared),
            seq_length=max(micro_batch.tokens.shape[1] for micro_batch in prepared),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return kept

    def _forward_step(
        self,
        iterator: Iterator[_MicroBatch],
        chunk: Any,
        kept: dict[int, Mapping[str, torch.Tensor]],
        loss: LossFunction,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        """What Megatron's schedule calls for each micro-batch and chunk; the closure is called on the last stage
        only."""
        batch = next(iterator)
        output = chunk(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)

        def close(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            outputs = self._token_outputs(chunk, output, batch.targets, temperature, with_entropy)
            value, sums = loss(outputs, batch.loss)
            kept[batch.number] = {name: tensor.detach() for name, tensor in sums.items()}
            if torch.is_grad_enabled() and not value.requires_grad:
                # A micro-batch without loss tokens: backward must run all the same, for the other ranks wait for it.
                value = value + 0.0 * output.sum()
            # The schedule empties the storage of what it gets (deallocate_pipeline_outputs), so it gets its own. A
            # count of zero, because the loss comes divided.
            return value.clone(), torch.zeros((), dtype=torch.int, device=value.device), None

        return output, close

    def _token_outputs(
        self, chunk: Any, output: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
    ) -> TokenOutputs:
        """output: a value head's values [1, T, 1]; else hidden states, or logits [1, T, V / tensor]."""
        if self.role in VALUE_ROLES:
            return TokenOutputs(values=output[0, :, 0].float())
        model = unwrapped(chunk)
        rest = (
            self.groups.tensor,
            temperature,
            self.hf_config.vocab_size,
            self.chunk_size,
            with_entropy,
            self.compiles,
        )
        if model.stops_at_hidden:
            weight = model.output_weight
            finish_param_gather_of(chunk, weight)
            main_grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
            found = fused_logprobs(model.whole_hidden(output), weight, targets, *rest, main_grad=main_grad)
        else:
            found = vocab_parallel_logprobs(output[0], targets, *rest)
        return TokenOutputs(logprobs=found.logprobs, entropy=found.entropy)

    def _output_names(self, with_entropy: bool) -> list[str]:
        if self.role in VALUE_ROLES:
            return ["values"]
        return ["logprobs", "entropy"] if with_entropy else ["logprobs"]

    def _prepare(self, number: int, batch: PackedBatch) -> _MicroBatch:
        """This context rank's part, on the device.

        Padding at the end of a sequence counts as part of it: attention is causal, so no real token sees it, and the
        kernels that know nothing of padding are the fast ones."""
        multiple = self.parallel.sequence_multiple
        wrong = np.flatnonzero(np.diff(batch.cu_seqlens) % multiple)
        if len(wrong):
            padded = np.diff(batch.cu_seqlens)[wrong[0]]
            raise ValueError(
                f"micro-batch {number}, sequence {wrong[0]}: {padded} tokens with padding are no multiple of "
                f"{multiple}, which {self.parallel} needs; pack with multiple={multiple}"
            )
        size, rank = self.parallel.context, self.groups.coordinates.context

        def part(*arrays: np.ndarray[Any, Any]) -> torch.Tensor:
            """Each [T], as rows: the GPU waits between copies, so there are few of them."""
            own = np.stack([split_zigzag(array, batch.cu_seqlens, size, rank) for array in arrays])
            return torch.from_numpy(own).to(device(), non_blocking=True)

        tokens, positions, targets = part(batch.tokens, batch.positions, batch.targets)
        per_token = part(*batch.per_token.values()) if batch.per_token else ()
        cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32).to(device(), non_blocking=True)
        longest = int(np.diff(batch.cu_seqlens).max())
        # Transformer Engine wants the padded bounds too under context parallel, and compares them (a wait for the GPU)
        # if it has them.
        padded = cu_seqlens if size > 1 else None
        return _MicroBatch(
            number=number,
            tokens=tokens[None],
            positions=positions[None],
            targets=targets,
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                cu_seqlens_q_padded=padded,
                cu_seqlens_kv_padded=padded,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            loss=TokenBatch(mask=part(batch.mask)[0], per_token=dict(zip(batch.per_token, per_token, strict=True))),
        )

    def _share_outputs(self, flat: torch.Tensor) -> list[FloatArray]:
        """From the last stage to all, and joined over context: [rows, T / context] to one array for each context
        rank."""
        if self.parallel.pipeline > 1:
            dist.broadcast(flat, src=dist.get_process_group_ranks(self.groups.pipeline)[-1], group=self.groups.pipeline)
        parts = [flat]
        if self.parallel.context > 1:
            parts = [torch.empty_like(flat) for _ in range(self.parallel.context)]
            dist.all_gather(parts, flat, group=self.groups.context)
        return [part.cpu().numpy() for part in parts]

    def _sum_over_ranks(self, sums: Sequence[Mapping[str, torch.Tensor]]) -> tuple[list[str], torch.Tensor]:
        """The loss function's sums over micro-batches, data and context ranks, made known to all pipeline stages: their
        names, and the numbers on the device."""
        names = list(sums[0]) if sums else []
        if self.parallel.pipeline > 1:
            source = dist.get_process_group_ranks(self.groups.pipeline)[-1]
            boxed = [names]
            dist.broadcast_object_list(boxed, src=source, group=self.groups.pipeline, device=device())
            names = boxed[0]
        totals = torch.zeros(len(names), dtype=torch.float64, device=device())
        for of_batch in sums if names else ():
            totals += torch.stack([of_batch[name].double() for name in names])
        if self.groups.is_last_stage:
            dist.all_reduce(totals, group=self.groups.data_and_context)
        if self.parallel.pipeline > 1:
            dist.broadcast(totals, src=source, group=self.groups.pipeline)
        return names, totals

    # -------------------------------------------------------------------------------------------- weights

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's current parameters by name (see `model.gpt.local_parameters`), sharing memory with the model:
        weights may be copied into them; then call `mark_weights_loaded`. With overlap_param_gather the first call after
        a step is collective.

        Raises RuntimeError while they are released."""
        if self.residency.is_released("parameters"):
            raise RuntimeError(f"the {self.role}'s parameters are off the device; call resume(['parameters']) first")
        finish_param_gather(self.chunks)
        return {name: parameter.data for name, parameter in local_parameters(self.chunks).items()}

    @property
    def uses_fused_norms(self) -> bool:
        """Whether a layer's norms go by the names of Transformer Engine's fused layers."""
        return uses_fused_norms(self.chunks)

    def mark_weights_loaded(self) -> None:
        """New weights were copied into `parameters()`: bring the optimizer's float32 main parameters up to date."""
        if self.optimizer is not None:
            reload_main_parameters(self.optimizer)

    # -------------------------------------------------------------------------------------------- residency

    def release(self, kinds: Collection[Kind] = KINDS) -> None:
        """Take these kinds off the GPU, to pinned memory; gradients are dropped. On the CPU nothing happens. With
        overlap_param_gather the first call after a step is collective."""
        if not self.residency.is_released("parameters"):
            finish_param_gather(self.chunks)
        self.residency.release(kinds)

    def resume(self, kinds: Collection[Kind] = KINDS) -> None:
        """Bring these kinds back, as they were; gradients as zeros."""
        self.residency.resume(kinds)

    def resident(self, kinds: Collection[Kind] = KINDS) -> contextlib.AbstractContextManager[None]:
        """These kinds are on the GPU inside; those that were not leave again."""
        return self.residency.resident(kinds)

    def _parameter_tensors(self) -> Iterator[torch.Tensor]:
        return (parameter.data for chunk in self.chunks for parameter in chunk.parameters())

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks if self.optimizer is not None else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for inner in self.optimizer.chained_optimizers if self.optimizer is not None else ():
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter.data
                    yield from (state for state in inner.optimizer.state[parameter].values() if torch.is_tensor(state))

    # -------------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: str) -> None:
        """Write model and optimizer into `folder`, which must not hold another checkpoint. Collective; all ranks see
        the same file system. A later `load` may have other parallel sizes."""
        self.start_save(folder).finish()

    def start_save(self, folder: str) -> PendingSave:
        """The same, but training may go on as soon as this returns; the checkpoint is there when the save is finished,
        before the next one begins. Collective."""
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()
        with self.groups.activate(), self.resident(), torch.no_grad():
            finish_param_gather(self.chunks)
            strategy = FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy("torch_dist"), self.groups.data_and_context
            )
            if self.optimizer is not None:
                make_states(self.optimizer)
            state = self._sharded_state(is_loading=False)
            request = dist_checkpointing.save(
                state, folder, sharded_strategy=strategy, content_metadata=SHARDING, async_sharded_save=True
            )
            return PendingSave(request, folder)

    def load(self, folder: str) -> None:
        """Bring back what `save` wrote; training goes on as if it had not been interrupted. Collective.

        Raises FileNotFoundError when `folder` holds no checkpoint, ValueError when it is not of this model or damaged.
        """
        self._load(folder, with_optimizer=self.optimizer is not None)

    def load_weights(self, folder: str) -> None:
        """Bring back the weights alone of what `save` wrote, with or without an optimizer: the optimizer's moments stay
        as they are, its main parameters become the new weights. Collective.

        Raises as `load`."""
        self._load(folder, with_optimizer=False)
        with self.resident():
            self.mark_weights_loaded()

    def _load(self, folder: str, with_optimizer: bool) -> None:
        if not is_stored(folder):
            raise FileNotFoundError(f"no checkpoint of the {self.role} in {folder}")
        stored = read_stored(folder)
        if with_optimizer and not stored.has_optimizer:
            raise ValueError(f"{folder} holds weights but no optimizer to go on from; load_weights takes those")
        with self.groups.activate(), self.resident(), torch.no_grad():
            finish_param_gather(self.chunks)
            state = self._sharded_state(is_loading=True, with_optimizer=with_optimizer)
            self._check_stored(state["model"], stored)
            _drop_unstored_objects(state["model"], stored)
            strategy = FullyParallelLoadStrategyWrapper(
                get_default_load_sharded_strategy(folder), self.groups.data_and_context
            )
            try:
                state = dist_checkpointing.load(state, folder, sharded_strategy=strategy)
            except CheckpointException as error:  # a BaseException, of all ranks' failures
                cause, _ = next(iter(error.failures.values()))
                raise ValueError(f"{folder} cannot be read: {cause}; copy the checkpoint again") from error
            for number, chunk in enumerate(self.chunks):
                found = unwrapped(chunk).load_state_dict(state["model"][f"chunk_{number}"], strict=False)
                wrong = [*found.unexpected_keys, *(k for k in found.missing_keys if not k.endswith("_extra_state"))]
                assert not wrong, f"the sharded state and the model differ in {wrong}"
            if with_optimizer:
                self.optimizer.load_state_dict(state["optimizer"])

    def _check_stored(self, model: Mapping[str, Any], stored: Stored) -> None:
        """The checkpoint has every tensor of the model in its shape, and no other. Nothing is read. Collective.

        Raises ValueError on every rank, naming the first missing, misshapen or extra tensor of any."""
        wanted = dict(_sharded_tensors(model))
        problems = [self._problem(key, tensor, stored) for key, tensor in wanted.items()]
        found = next(filter(None, problems), None)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (found, list(wanted)))
        known = {key for _, keys in of_ranks for key in keys}
        extra = [f"{k} {list(t.shape)} is not part of the model" for k, t in stored.tensors.items() if k not in known]
        for problem in (*(problem for problem, _ in of_ranks), *extra):
            if problem:
                raise ValueError(f"{stored.folder} is no checkpoint of this {self.role}: tensor {problem}")

    def _problem(self, key: str, tensor: Any, stored: Stored) -> str | None:
        shape, found = tuple(tensor.global_shape), stored.tensors.get(key)
        if found is None:
            return f"{key} {list(shape)} is missing"
        if tensor.allow_shape_mismatch and shape[0] > 1:  # the vocabulary, padded for the sizes of whoever saved it
            rows, vocab = found.shape[0], self.hf_config.vocab_size
            sizes = range(1, rows // VOCAB_MULTIPLE + 1)
            is_padded = any(padded_vocab_size(vocab, size) == rows for size in sizes)
            is_good, need = is_padded and found.shape[1:] == shape[1:], f"[{vocab} and padding, {shape[1]}]"
        else:
            is_good, need = found.shape == shape, str(list(shape))
        return None if is_good else f"{key} is {list(found.shape)}, the model needs {need}"

    def _sharded_state(self, is_loading: bool, with_optimizer: bool = True) -> dict[str, Any]:
        metadata = {**SHARDING, "dp_cp_group": self.groups.data_and_context}
        model = {
            f"chunk_{number}": unwrapped(chunk).sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.chunks)
        }
        for chunk in model.values():
            _name_norms_before_experts(chunk)
        state: dict[str, Any] = {"model": model}
        if self.optimizer is not None and with_optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return state


def _name_norms_before_experts(chunk: Mapping[str, Any]) -> None:
    """Store the norm before a layer's experts under Transformer Engine's name, so that a checkpoint made without it
    loads with it: megatron-core (0.16.1) names the norms of all its own layers as if an MLP's first product had them
    inside, but before experts Transformer Engine has them apart too."""
    for name, tensor in chunk.items():
        layer, is_norm, _ = name.partition("pre_mlp_layernorm.weight")
        if is_norm and f"{layer}mlp.router.weight" in chunk:
            tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def _sharded_tensors(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a sharded state by the keys under which they are stored."""
    for value in nested_values(model):
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded_tensors({"": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value.key, value


def _drop_unstored_objects(model: Mapping[str, dict[str, Any]], stored: Stored) -> None:
    """Of the modules' extra states (fp8 scales, else empty) take those that are there: Transformer Engine's layers have
    more of them than the layers on the CPU."""
    for chunk in model.values():
        for name, value in list(chunk.items()):
            if isinstance(value, ShardedObject) and value.unique_key not in stored.objects:
                del chunk[name]
