"""One trainer process: the roles it is a rank of, its share of each step, and (hf engine) the rollout engine it hosts.

Every method is called by the group on all ranks together. Nothing here computes losses or advantages: it moves data
between the object store, the engines and the pure functions. The driver imports this module to start the processes, so
Megatron is imported where it is used: 4 seconds that the driver need not spend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import ray
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from megarl.algorithms.advantages import Moments
from megarl.algorithms.aggregation import sequence_weights
from megarl.algorithms.correction import step_correction
from megarl.algorithms.schedule import learning_rate
from megarl.algorithms.step_advantages import step_advantages, whitened
from megarl.config import Config, OptimizerConfig
from megarl.data.packing import PackedBatch, TokenSequence, pack, unpack
from megarl.engines.hf import HFEngine
from megarl.engines.residency import Kind
from megarl.engines.rollout_mismatch import rollout_mismatch
from megarl.metrics import Stats
from megarl.model.families import declare_role
from megarl.model.role_layout import role_layout
from megarl.parallel import device
from megarl.parallel.topology import RankGrid
from megarl.reshard import hf_files
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import hf_files_layout
from megarl.reshard.plan import Place, ReshardPlan, plan
from megarl.rewards.model import RewardTokens, passes_tokens
from megarl.types import Sample
from megarl.workers import placement, weights
from megarl.workers.generation import Generation, Job, Stopped, Taken
from megarl.workers.messages import (
    AdvantageResult,
    ForwardResult,
    MicroBatches,
    Retokenised,
    UpdatePlan,
    WhitenedResult,
)
from megarl.workers.step_store import StepStore

if TYPE_CHECKING:
    from megarl.engines.megatron import MegatronEngine
    from megarl.engines.saving import PendingSave

FORWARD_NAMES = {"actor": "old_logprobs", "reference": "reference_logprobs", "critic": "values"}
"""Under which name each role's forward pass is kept."""

REWARD_TOKENS = "reward_model_tokens"
"""Under which name each sample's tokens are kept that the reward model reads."""

STOP_FACTOR = 1.5
"""Times actor.target_kl: where an update ends, as in OpenAI Spinning Up's PPO."""


class TrainerWorker:
    """The process of one rank. Made empty; `setup` gives it its rank."""

    def where(self, bundle: int) -> placement.Seat:
        return placement.here(bundle)

    def free_port(self, address: str) -> int:
        return placement.free_port(address)

    def setup(self, config: Config, rank: int, gpu: int | None, places: Sequence[Place], master: str) -> None:
        """Join torch.distributed. `master` is tcp://address:port of rank 0; `places` says where every rank is."""
        self.config, self.rank, self.places = config, rank, tuple(places)
        self.num_ranks = config.cluster.num_ranks
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.num_ranks), LOCAL_RANK=str(gpu or 0))
        device.set_device(gpu or 0)
        dist.init_process_group(
            device.backend(),
            init_method=master,
            rank=rank,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=config.run.deadline),
        )
        # NCCL wants all ranks in a group's first operation; a weight sync may leave some without a message.
        dist.barrier()
        self.engines: dict[str, MegatronEngine] = {}
        self.grids: dict[str, RankGrid] = {}
        self.layouts: dict[str, Layout] = {}
        self.skipped_in_a_row: dict[str, int] = {}
        self.store = StepStore()
        self.reward_tokens: RewardTokens | None = None
        self.embedded: HFEngine | None = None
        self.generation: Generation | None = None
        self._saves: list[PendingSave] = []
        self._syncs = weights.SyncMember(config, rank, device.device())

    # -------------------------------------------------------------------------------------------- building

    def build_role(self, role: str, folder: str) -> dict[str, Any]:
        """Build a role's model and optimizer, and read its weights from a Hugging Face folder. Returns facts for the
        log."""
        from megarl.engines.megatron import MegatronEngine

        config, parallel = self.config, self.config.roles()[role]
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
        trained = {"actor": config.actor, "critic": config.critic}.get(role)
        engine = MegatronEngine(
            role,
            hf_config,
            parallel,
            precision=config.model.precision,
            optimizer=trained.optimizer if trained else None,
            recompute=trained.recompute if trained else None,
            offload_activations=trained.offload.activations if trained else (),
            seed=config.run.seed,
            timeout=config.run.deadline,
            compiles=config.model.compile,
        )
        layout = role_layout(role, hf_config, parallel, self.num_ranks, engine.uses_fused_norms)
        self._check_parameters(role, layout, engine)
        weights.load_role(role, folder, hf_config, layout, self.rank, engine.parameters())
        engine.mark_weights_loaded()
        self.engines[role], self.layouts[role] = engine, layout
        self.grids[role] = RankGrid(self.num_ranks, parallel)
        if role == "reward_model":
            self.reward_tokens = self._reward_tokens(folder, hf_config)
        return {"parameters": sum(int(np.prod(s)) for s in layout.tensors.values()), "layout": layout.name}

    def _reward_tokens(self, folder: str, hf_config: Any) -> RewardTokens:
        config, own = self.config, self.config.reward_model
        trust = config.model.trust_remote_code
        policy = None
        if not passes_tokens(config):
            policy = AutoTokenizer.from_pretrained(
                config.model.tokenizer_path or config.model.path, trust_remote_code=trust
            )
        tokenizer = AutoTokenizer.from_pretrained(own.tokenizer_path or folder, trust_remote_code=trust)
        pad = getattr(hf_config, "pad_token_id", None)
        return RewardTokens(tokenizer, policy, own.apply_chat_template, own.max_length, pad)

    def _check_parameters(self, role: str, layout: Layout, engine: MegatronEngine) -> None:
        planned = {name: tuple(shape) for name, shape in layout.shard(self.rank).parameters.items()}
        actual = {name: tuple(p.shape) for name, p in engine.parameters().items()}
        if planned != actual:
            differ = sorted(n for n in planned.keys() | actual.keys() if planned.get(n) != actual.get(n))
            name = differ[0]
            raise ValueError(
                f"{role}: the layout and Megatron differ in {len(differ)} parameters: {name} is {planned.get(name)} "
                f"in the layout, {actual.get(name)} in Megatron"
            )

    def build_embedded(self, folder: str, stop_token_ids: Sequence[int]) -> None:
        """Host an hf engine in this process; its weights come by sync."""
        config = self.config
        self.embedded = HFEngine(
            folder,
            precision=config.model.precision,
            max_batch=config.rollout.max_batch,
            device=str(device.device()),
            trust_remote_code=config.model.trust_remote_code,
            load_weights=False,
        )
        self.generation = Generation.of(self.embedded, config, folder, stop_token_ids)

    # -------------------------------------------------------------------------------------------- a step

    def begin_step(self, samples: Mapping[int, tuple[Any, int]]) -> float | None:
        """Fetch this rank's samples: sample index -> (reference to a list of samples, position in it). Returns the GB
        of the GPU that are in use by anyone, for the engine sleeps now; None without one."""
        self.store = StepStore()
        device.reset_peak_memory()
        refs = list(dict.fromkeys(ref for ref, _ in samples.values()))
        lists: dict[Any, list[Sample]] = dict(zip(refs, ray.get(refs), strict=True))
        self.store.samples = {index: lists[ref][position] for index, (ref, position) in samples.items()}
        return device.memory_statistics().used_gb

    def forward(self, role: str, micro_batches: MicroBatches) -> ForwardResult:
        """Log-probs or values of this data-parallel rank's samples, kept under FORWARD_NAMES."""
        engine, grid = self.engines[role], self.grids[role]
        batches = self.store.batches(micro_batches, self._multiple(role))
        outputs = engine.forward(batches, temperature=self.config.rollout.temperature, with_entropy=role == "actor")
        name = "values" if role == "critic" else "logprobs"
        found: dict[int, np.ndarray] = {}
        entropies: dict[int, np.ndarray] = {}
        for indices, batch, output in zip(micro_batches, batches, outputs, strict=True):
            found.update(zip(indices, unpack(output[name], batch), strict=True))
            if "entropy" in output:
                entropies.update(zip(indices, unpack(output["entropy"], batch), strict=True))
        self.store.put(FORWARD_NAMES[role], found)
        if self.rank != grid.output_rank(grid.coordinates(self.rank).data):
            return ForwardResult(None)
        samples = [self.store.samples[i] for i in found]
        if role != "actor":
            return ForwardResult(ray.put(found), stats=_loss_token_stats(samples, list(found.values())))
        mismatch, difference = rollout_mismatch(samples, list(found.values()))
        entropy = _moments(samples, [entropies[i] for i in found])
        return ForwardResult(ray.put(found), entropy, mismatch, difference)

    def retokenise(self, indices: Sequence[int]) -> Retokenised:
        """Make the reward model's tokens of these samples, for `score`."""
        assert self.reward_tokens is not None, "the reward model was not built"
        tokens, num_truncated = self.reward_tokens([self.store.samples[i] for i in indices])
        self.store.put(REWARD_TOKENS, dict(zip(indices, tokens, strict=True)))
        return Retokenised([len(own) for own in tokens], num_truncated)

    def score(self, micro_batches: MicroBatches) -> dict[int, float]:
        """The reward model's score of each of these samples: its value at the last token."""
        read = [self.store.get(REWARD_TOKENS, indices) for indices in micro_batches]
        multiple = self._multiple("reward_model")
        batches = [pack([TokenSequence(own, len(own), []) for own in bins], multiple=multiple) for bins in read]
        outputs = self.engines["reward_model"].forward(batches)
        found: dict[int, float] = {}
        for indices, batch, output in zip(micro_batches, batches, outputs, strict=True):
            found.update(zip(indices, _last_values(output["values"], batch), strict=True))
        return found

    def rescore(self, indices: Sequence[int], scores: Sequence[float]) -> None:
        """Put these in the place of the samples' scores."""
        samples = self.store.samples
        samples.update({i: replace(samples[i], score=score) for i, score in zip(indices, scores, strict=True)})

    def receive(self, name: str, indices: Sequence[int], refs: Sequence[Any]) -> None:
        """Take the per-token arrays of these samples that other ranks computed; nothing where all are here already."""
        wanted = set(indices) - self.store.all(name).keys()
        if wanted:
            for values in ray.get(list(refs)):
                self.store.put(name, {i: v for i, v in values.items() if i in wanted})

    def advantages(
        self, indices: Sequence[int], kl_coef: float, sample_advantages: Sequence[float] | None
    ) -> AdvantageResult:
        """Compute rewards and advantages of this rank's samples of the actor; whitening waits for everyone's sums."""
        store, config = self.store, self.config
        samples = [store.samples[i] for i in indices]
        if config.algorithm.correction.bypass:
            store.put("old_logprobs", {i: store.samples[i].rollout_logprobs for i in indices})
        result = step_advantages(
            config.algorithm,
            kl_coef,
            samples,
            store.get("old_logprobs", indices) if self._knows_old_logprobs else None,
            store.get("reference_logprobs", indices) if config.needs_reference else None,
            store.get("values", indices) if config.needs_critic else None,
            sample_advantages,
        )
        store.put("advantages", dict(zip(indices, result.advantages, strict=True)))
        if result.returns is not None:
            store.put("returns", dict(zip(indices, result.returns, strict=True)))
        correction = None
        if config.algorithm.correction.is_on:
            found, correction = step_correction(
                config.algorithm.correction, samples, store.get("old_logprobs", indices)
            )
            store.put("importance_weights", dict(zip(indices, found, strict=True)))
        return AdvantageResult(result.moments, result.kl, Stats.of(result.rewards), correction)

    def whiten(self, indices: Sequence[int], moments: Moments | None) -> WhitenedResult:
        """Whiten the advantages by the moments of all ranks (None: leave them), and give the returns to the critic's
        ranks."""
        store = self.store
        samples = [store.samples[i] for i in indices]
        advantages = store.get("advantages", indices)
        if moments is not None:
            advantages = whitened(advantages, samples, moments)
            store.put("advantages", dict(zip(indices, advantages, strict=True)))
        empty = Moments(0, 0.0, 0.0)
        if not self.config.needs_critic:
            return WhitenedResult(_loss_token_stats(samples, advantages), Stats(), empty, empty, None)
        returns, values = store.get("returns", indices), store.get("values", indices)
        residuals = [r - v for r, v in zip(returns, values, strict=True)]
        return WhitenedResult(
            _loss_token_stats(samples, advantages),
            _loss_token_stats(samples, returns),
            _moments(samples, residuals),
            _moments(samples, returns),
            ray.put(dict(zip(indices, returns, strict=True))),
        )

    def update(self, role: str, steps: UpdatePlan) -> dict[str, float]:
        """Do a role's optimizer steps, all or until actor.target_kl ends them; returns its metrics, means over the
        optimizer steps that were made."""
        from megarl.engines.objectives import policy_objective, value_objective

        config = self.config
        trained = config.actor if role == "actor" else config.critic
        sums_sequences = role == "actor" and config.actor.policy_loss == "gspo"
        context = self.engines[role].groups.context if sums_sequences else None
        objective = (
            policy_objective(config.actor, context, steps.entropy_coef)
            if role == "actor"
            else value_objective(config.critic)
        )
        constant = config.aggregation_constant if role == "actor" else None
        has_entropy = role == "actor" and steps.entropy_coef != 0
        engine = self.engines[role]
        totals: dict[str, list[float]] = {}
        planned = [*zip(steps.mini_batches, steps.denominators, strict=True)] * trained.batch.epochs
        stopped = False
        for step, (micro_batches, (tokens, sequences)) in enumerate(planned, steps.first_step):
            batches = self.store.batches(
                micro_batches,
                self._multiple(role),
                self._per_token(role),
                self._weights(micro_batches, trained.aggregation, tokens, sequences, constant)
                | (_sequence_numbers(micro_batches) if sums_sequences else {}),
            )
            lr = learning_rate_of(trained.optimizer, step, steps.total_steps)
            result = engine.train_step(
                batches, objective, lr=lr, temperature=config.rollout.temperature, with_entropy=has_entropy
            )
            own = {
                **result.sums,
                f"{role}/grad_norm": result.grad_norm,
                f"{role}/lr": lr,
                f"{role}/skipped_updates": float(not result.applied),
            }
            for name, value in own.items():
                totals.setdefault(name, []).append(value)
            self._count_skipped(role, result.applied, step + 1, result.grad_norm)
            stopped = role == "actor" and self._has_gone_far(result.sums)
            if stopped:
                break
        made = len(totals[f"{role}/lr"])
        skipped = sum(totals.pop(f"{role}/skipped_updates"))
        metrics = {name: float(np.mean(values)) for name, values in totals.items()}
        if role == "actor" and config.actor.target_kl is not None:
            metrics |= {
                "actor/stopped_early": float(stopped and made < len(planned)),
                "actor/optimizer_steps": float(made),
            }
        return metrics | {f"{role}/skipped_updates": skipped}

    def _has_gone_far(self, sums: Mapping[str, float]) -> bool:
        """Whether the policy was so far from the old one in an optimizer step that actor.target_kl ends the update. The
        sums come from groups of ranks that may have added in another order, so one says it for all: ranks that did not
        agree would wait for each other."""
        if self.config.actor.target_kl is None:
            return False
        far = sums["actor/ppo_kl"] > STOP_FACTOR * self.config.actor.target_kl
        if self.num_ranks == 1:
            return far
        flag = torch.tensor([far], dtype=torch.float32, device=device.device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _count_skipped(self, role: str, applied: bool, step: int, grad_norm: float) -> None:
        """Stop the run when too many updates in a row were skipped; the same on every rank."""
        self.skipped_in_a_row[role] = 0 if applied else self.skipped_in_a_row.get(role, 0) + 1
        if self.skipped_in_a_row[role] >= self.config.run.max_skipped_updates:
            raise FloatingPointError(
                f"the {role}'s gradient norm was not finite ({grad_norm}) in {self.skipped_in_a_row[role]} updates in "
                f"a row, the last one optimizer step {step}; its weights are those from before them. Lower "
                f"{role}.optimizer.lr, look at the rewards, or raise run.max_skipped_updates"
            )

    def _per_token(self, role: str) -> dict[str, str]:
        if role == "critic":
            return {"old_values": "values", "returns": "returns"}
        names = {"advantages": "advantages"}
        if self._knows_old_logprobs:
            names["old_logprobs"] = "old_logprobs"
        if self.config.algorithm.correction.is_on:
            names["importance_weights"] = "importance_weights"
        return names | ({"reference_logprobs": "reference_logprobs"} if self.config.actor.kl_loss_coef > 0 else {})

    def _weights(
        self, micro_batches: MicroBatches, aggregation: str, tokens: int, sequences: int, constant: float | None
    ) -> dict[str, dict[int, float]]:
        indices = [i for batch in micro_batches for i in batch]
        counts = [int(self.store.samples[i].loss_mask.sum()) for i in indices]
        loss = sequence_weights(aggregation, counts, tokens, sequences, constant)
        token = sequence_weights("token-mean", counts, tokens, sequences)
        return {
            "loss_weight": dict(zip(indices, loss, strict=True)),
            "token_weight": dict(zip(indices, token, strict=True)),
        }

    @property
    def _knows_old_logprobs(self) -> bool:
        """Otherwise they are those in the update."""
        return self.config.algorithm.correction.bypass or not self.config.skips_old_logprobs

    def _multiple(self, role: str) -> int:
        return self.config.roles()[role].sequence_multiple

    # -------------------------------------------------------------------------------------------- weights

    def layout(self, role: str) -> Layout:
        """Where each of a role's weights lies on the trainer ranks."""
        return self.layouts[role]

    def open_store(self, address: str) -> int:
        """Serve the store at which the communicators of the sync meet; returns its port."""
        return self._syncs.open_store(address)

    def lost_replicas(self) -> set[int]:
        """Replicas that this rank could not sync, whose communicator is to be made anew."""
        return self._syncs.lost()

    def prepare_sync(self, terms: weights.SyncTerms) -> weights.Facts:
        """Plan the sync from the actor to the engine's layout; every process makes the same plan."""
        if self.embedded is not None:
            _check_engine_parameters(terms.target, self.rank, self.embedded)
        group = dist.group.WORLD if self.num_ranks > 1 else None
        return self._syncs.prepare(self.layouts["actor"], terms, is_embedded=self.embedded is not None, group=group)

    def sync(self, number: int, version: int, deadline: float) -> weights.SyncReport:
        """Sync `number`: send the actor's weights, receive for this rank's engine ranks. Stamps an embedded engine."""
        embedded = self.embedded.parameters() if self.embedded is not None else None
        source = self.engines["actor"].parameters()
        report = self._syncs.sender.sync(number, source, embedded, self.config.sync.verify, deadline)
        self.set_version(version)
        return report

    def set_version(self, version: int) -> None:
        """Stamp the embedded engine's weights."""
        if self.embedded is not None:
            self.embedded.set_version(version)

    def save_hf(self, role: str, source_folder: str, folder: str) -> None:
        """Write a role's weights as a Hugging Face folder."""
        dtype = weights.wire_dtype(self.config)
        save_plan = self._save_plan(role, source_folder, dtype.itemsize)
        parameters = self.engines[role].parameters()
        weights.save_hf(save_plan, dtype, self.rank, self.num_ranks, device.device(), parameters, source_folder, folder)

    def _save_plan(self, role: str, folder: str, itemsize: int) -> ReshardPlan:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=self.config.model.trust_remote_code)
        declaration = declare_role(role, hf_config)
        num_files = hf_files.num_files(declaration.tensors(), itemsize, weights.MAX_FILE_BYTES)
        target = hf_files_layout(declaration, num_files)
        hosts = hf_files.file_hosts(target.num_ranks, self.num_ranks)
        return plan(self.layouts[role], target, itemsize, self.places, [self.places[host] for host in hosts])

    def start_save(self, folder: str) -> None:
        """Copy the trained roles to host memory and begin to write them into `folder`."""
        trained = [role for role in ("actor", "critic") if role in self.engines]
        self._saves = [self.engines[role].start_save(os.path.join(folder, role)) for role in trained]

    def is_saved(self) -> bool:
        """Whether this rank's files are written."""
        return all(save.is_written for save in self._saves)

    def finish_save(self) -> None:
        """Wait until all ranks' files are written, and write the indices."""
        saves, self._saves = self._saves, []
        for save in saves:
            save.finish()

    def load_checkpoint(self, folder: str) -> None:
        for role in ("actor", "critic"):
            if role in self.engines:
                self.engines[role].load(os.path.join(folder, role))

    # -------------------------------------------------------------------------------------------- engine and memory

    def submit_jobs(self, jobs: Mapping[int, Job]) -> None:
        """Answer jobs with the embedded engine; their numbers are the driver's."""
        self._generation().submit(jobs)

    def take_groups(self, at_least: int, wait: float) -> Taken:
        """Groups that have ended and are scored: so many, or what there is after `wait` seconds."""
        return self._generation().take(at_least, wait)

    def stop_jobs(self, deadline: float) -> Stopped:
        """End all that is under way."""
        return self._generation().stop(deadline)

    def _generation(self) -> Generation:
        assert self.generation is not None, "build_embedded comes first"
        return self.generation

    def release(self, role: str, kinds: Sequence[Kind]) -> None:
        """Move these kinds of a role's memory (parameters, gradients, optimizer) to the host while it is idle."""
        self.engines[role].release(kinds)

    def resume(self, role: str, kinds: Sequence[Kind]) -> None:
        """Bring them back."""
        self.engines[role].resume(kinds)

    def device_name(self) -> str:
        """The GPU's name, "cpu" without one."""
        return device.name()

    def empty_cache(self) -> None:
        """Give the GPU memory that torch keeps but does not use to the engine that shares the GPU."""
        device.empty_cache()

    def memory(self) -> dict[str, float]:
        """Peaks of this process's GPU memory, all that is in use of its GPU now, and of its node's host memory, in GB
        (1e9 bytes)."""
        found = device.memory_statistics()
        return {
            **({} if found.used_gb is None else {"gpu_used_awake_gb": found.used_gb}),
            "max_memory_allocated_gb": found.max_allocated / 1e9,
            "max_memory_reserved_gb": found.max_reserved / 1e9,
            "cpu_memory_used_gb": psutil.virtual_memory().used / 1e9,
        }


def learning_rate_of(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0."""
    return learning_rate(
        step, config.lr, config.min_lr, config.warmup_steps, max(total_steps, config.warmup_steps + 1), config.schedule
    )


def _sequence_numbers(micro_batches: MicroBatches) -> dict[str, dict[int, float]]:
    """Each sample's number in its micro-batch, from 0."""
    return {"sequence": {i: float(number) for batch in micro_batches for number, i in enumerate(batch)}}


def _last_values(values: np.ndarray, batch: PackedBatch) -> list[float]:
    """Of values [T] those at each sequence's last token, before its padding; none for a dummy batch."""
    last = batch.cu_seqlens[:-1] + batch.lengths - 1
    return [] if batch.is_dummy else [float(value) for value in values[last]]


def _loss_token_stats(samples: Sequence[Sample], values: Sequence[np.ndarray]) -> Stats:
    return Stats.of(np.concatenate([v[s.loss_mask] for s, v in zip(samples, values, strict=True)]) if samples else [])


def _moments(samples: Sequence[Sample], values: Sequence[np.ndarray]) -> Moments:
    tokens = (
        np.concatenate([v[s.loss_mask] for s, v in zip(samples, values, strict=True)]).astype(np.float64)
        if samples
        else np.zeros(0)
    )
    return Moments(int(tokens.size), float(tokens.sum()), float(np.square(tokens).sum()))


def _check_engine_parameters(target: Layout, rank: int, engine: HFEngine) -> None:
    planned = {n: tuple(s) for n, s in target.shard(rank).parameters.items()}
    actual = {n: tuple(p.shape) for n, p in engine.parameters().items()}
    weights.compare_parameters(planned, actual, f"hf engine of rank {rank}")
