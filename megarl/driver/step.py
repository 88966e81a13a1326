"""The learning half of a step: forward passes, advantages, updates, each timed. The driver sees lengths, scalars and
sums only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

from megarl.algorithms.advantages import GROUP_ADVANTAGES, Moments, remax
from megarl.algorithms.diagnostics import explained_variance
from megarl.algorithms.entropy import EntropyController, FixedEntropyController
from megarl.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    OffloadConfig,
    ReferenceConfig,
    RewardModelConfig,
)
from megarl.data.schedule import StepSchedule, schedule_forward, schedule_step
from megarl.driver.rollout import RolloutBatch
from megarl.metrics import Stats, balance_metrics
from megarl.rewards.model import combined_scores
from megarl.workers.calls import WorkerError
from megarl.workers.group import TrainerGroup
from megarl.workers.messages import ForwardResult, UpdatePlan, limits


@dataclass
class Timer:
    """Seconds by stage of one step: `with timer("gen"): ...` adds to timing_s/gen."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Learning:
    """What the learning half of a step needs besides the samples."""

    config: Config
    group: TrainerGroup
    hidden_size: int
    total_steps: int


def learn(
    learning: Learning,
    batch: RolloutBatch,
    step: int,
    kl_coef: float,
    optimizer_steps: dict[str, int],
    timer: Timer,
    entropy_controller: EntropyController | None = None,
) -> tuple[dict[str, float], Moments]:
    """Learn from a batch; returns metrics and the moments of the KL to the reference.

    Args:
        step: the number of this step, from 1.
        optimizer_steps: of each role, done before; counted up here, also by those that actor.target_kl leaves out.
        entropy_controller: gives the weight of the entropy bonus; None: actor.entropy_coef.
    """
    config, group = learning.config, learning.group
    metrics: dict[str, float] = {}
    with timer("schedule"):
        schedules = {role: _schedule(learning, role, batch) for role in ("actor", "critic") if role in config.roles()}
        assignments: dict[str, Sequence[Sequence[int]]] = {role: s.assignment for role, s in schedules.items()}
        for role in ("reference", "reward_model"):
            if role in config.roles():
                assignments[role] = _forward_only_assignment(learning, role, batch)
        metrics |= group.begin_step(batch.handles, assignments)
    metrics |= balance_metrics(
        batch.lengths, [sum(batch.lengths[i] for i in part) for part in assignments["actor"]], len(assignments["actor"])
    )

    scores = batch.scores
    if "reward_model" in assignments:
        with timer("reward_model"):
            scores, found = _add_model_scores(learning, batch, assignments)
            metrics |= found
    outputs: dict[str, list[ForwardResult]] = {}
    for role, stage in (("actor", "old_log_prob"), ("reference", "ref"), ("critic", "values")):
        if role in assignments and not (role == "actor" and config.skips_old_logprobs):
            with timer(stage), resident(group, role, config, training=False):
                outputs[role] = group.forward(role, _forward_batches(learning, role, assignments[role], batch.lengths))
    metrics |= _forward_metrics(outputs)

    with timer("adv"):
        kl, found = _advantages(learning, batch, scores, assignments, outputs, kl_coef)
        metrics |= found
    if "critic" in schedules:
        with timer("update_critic"), resident(group, "critic", config, training=True):
            metrics |= _update(learning, "critic", schedules["critic"], batch, optimizer_steps)
    if step > config.run.critic_warmup:
        controller = entropy_controller or FixedEntropyController(config.actor.entropy_coef)
        entropy_coef = controller.bonus(metrics.get("actor/entropy"))
        if config.actor.entropy_target is not None:
            metrics["actor/entropy_coef"] = entropy_coef
        with timer("update_actor"), resident(group, "actor", config, training=True, parameters_stay=True):
            metrics |= _update(learning, "actor", schedules["actor"], batch, optimizer_steps, entropy_coef)
    return metrics, kl


@contextlib.contextmanager
def resident(
    group: TrainerGroup, role: str, config: Config, training: bool, parameters_stay: bool = False
) -> Iterator[None]:
    """A role's memory is on the GPU inside: parameters, and for training gradients and optimizer too. What the config
    offloads goes back to the host afterwards (parameters_stay: but for the parameters, which the sync that follows
    needs), and nothing when a worker failed or Ctrl-C ends the run: ranks may be gone or stuck in a collective, and a
    call to them would wait for the deadline and hide the first error."""
    offload = role_offload(config, role)
    wanted = {
        "parameters": offload.parameters,
        "gradients": training and offload.gradients,
        "optimizer": training and offload.optimizer,
    }
    kinds = [kind for kind, moved in wanted.items() if moved]
    if kinds:
        group.call(f"bringing the {role} to the GPU", "resume", role, kinds)
    try:
        yield
        kinds = [kind for kind in kinds if kind != "parameters" or not parameters_stay]
    except (WorkerError, KeyboardInterrupt):
        kinds = []
        raise
    finally:
        if kinds:
            group.call(f"moving the {role} to the host", "release", role, kinds)


def role_offload(config: Config, role: str) -> OffloadConfig:
    offload: OffloadConfig = getattr(config, role).offload
    return offload


def _trained(config: Config, role: str) -> ActorConfig | CriticConfig:
    return config.actor if role == "actor" else config.critic


def _schedule(learning: Learning, role: str, batch: RolloutBatch) -> StepSchedule:
    config, parallel = learning.config, learning.config.roles()[role]
    own = _trained(config, role).batch
    return schedule_step(
        batch.lengths,
        batch.groups,
        mini_batch_prompts=own.mini_batch_prompts,
        num_data_parallel=learning.group.grids[role].data_parallel_size,
        hidden_size=learning.hidden_size,
        multiple=parallel.sequence_multiple,
        count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        key=f"{role}.batch.max_tokens_per_gpu",
        **limits(own, parallel.context, forward=False),
    )


def _forward_only_assignment(learning: Learning, role: str, batch: RolloutBatch) -> list[list[int]]:
    """The samples of the reference or the reward model are spread like one mini-batch of all, by the policy's
    tokens."""
    own: ReferenceConfig | RewardModelConfig = getattr(learning.config, role)
    parallel, lengths = own.parallel, batch.lengths
    if isinstance(own, RewardModelConfig):
        lengths = [min(length, own.max_length) for length in lengths]
    schedule = schedule_step(
        lengths,
        batch.groups,
        mini_batch_prompts=len(batch.groups),
        num_data_parallel=learning.group.grids[role].data_parallel_size,
        hidden_size=learning.hidden_size,
        multiple=parallel.sequence_multiple,
        max_tokens=own.forward_max_tokens_per_gpu * parallel.context,
        key=f"{role}.forward_max_tokens_per_gpu",
    )
    return schedule.assignment


def _add_model_scores(
    learning: Learning, batch: RolloutBatch, assignments: dict[str, Sequence[Sequence[int]]]
) -> tuple[list[float], dict[str, float]]:
    """Each answer's score by rule and reward model together, which the actor's ranks get too, and metrics."""
    group, own = learning.group, learning.config.reward_model
    read = group.retokenise(assignments["reward_model"])
    lengths = dict(zip(chain(*assignments["reward_model"]), chain(*(r.lengths for r in read)), strict=True))
    own_lengths = [lengths[i] for i in range(len(batch.infos))]
    micro_batches = _forward_batches(learning, "reward_model", assignments["reward_model"], own_lengths)
    with resident(group, "reward_model", learning.config, training=False):
        by_index = {i: score for found in group.score(micro_batches) for i, score in found.items()}
    model_scores = [by_index[i] for i in range(len(batch.infos))]
    scores = combined_scores(batch.infos, model_scores, own.weight, own.rule_weight)
    group.rescore(assignments["actor"], [[scores[i] for i in part] for part in assignments["actor"]])
    return scores, {
        **Stats.of(model_scores).named("reward_model/score"),
        "reward_model/truncated": float(sum(r.num_truncated for r in read)),
        **Stats.of([info.rule_score for info in batch.infos]).named("reward/rule"),
    }


def _forward_batches(
    learning: Learning, role: str, assignment: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Sequence[Any]:
    """lengths: tokens of every sample, as the role reads it."""
    config, parallel = learning.config, learning.config.roles()[role]
    if role in ("reference", "reward_model"):
        key = f"{role}.forward_max_tokens_per_gpu"
        cut = {"max_tokens": getattr(config, role).forward_max_tokens_per_gpu * parallel.context}
    else:
        key = f"{role}.batch.forward_max_tokens_per_gpu"
        cut = limits(_trained(config, role).batch, parallel.context, forward=True)
    return schedule_forward(
        assignment,
        lengths,
        multiple=parallel.sequence_multiple,
        count_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        key=key,
        **cut,
    )


def _forward_metrics(outputs: dict[str, list[ForwardResult]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if "actor" in outputs:
        actor = outputs["actor"]
        entropy = reduce(add, [r.entropy for r in actor if r.entropy is not None])
        mismatch = reduce(add, [r.mismatch for r in actor if r.mismatch is not None])
        difference = reduce(add, [r.logprob_difference for r in actor if r.logprob_difference is not None])
        metrics["actor/entropy"] = entropy.mean
        metrics["training/rollout_probs_diff_mean"] = mismatch.mean
        metrics["training/rollout_probs_diff_max"] = mismatch.max
        metrics["training/rollout_probs_diff_std"] = mismatch.std
        metrics["training/rollout_logprobs_abs_diff_mean"] = difference.total / max(difference.count, 1)
    if "critic" in outputs:
        metrics |= reduce(add, [r.stats for r in outputs["critic"] if r.stats is not None]).named("critic/values")
    return metrics


def _advantages(
    learning: Learning,
    batch: RolloutBatch,
    scores: Sequence[float],
    assignments: dict[str, Sequence[Sequence[int]]],
    outputs: dict[str, list[ForwardResult]],
    kl_coef: float,
) -> tuple[Moments, dict[str, float]]:
    """Move values and reference log-probs to the actor's ranks, compute there, whiten by everyone's sums, move returns
    back."""
    config, group = learning.config, learning.group
    indices = assignments["actor"]
    for role, name in (("critic", "values"), ("reference", "reference_logprobs")):
        if role in outputs:
            group.receive("actor", name, indices, [r.values for r in outputs[role]])
    per_sample = _sample_advantages(config.algorithm, batch, scores)
    given = [None if per_sample is None else [per_sample[i] for i in part] for part in indices]
    results = group.advantages(indices, kl_coef, given)
    moments, kl = reduce(add, [r.moments for r in results]), reduce(add, [r.kl for r in results])
    finished = group.whiten(indices, moments if config.algorithm.whitens else None)
    metrics = {
        **reduce(add, [r.rewards for r in results]).named("critic/rewards"),
        **Stats.of(scores).named("critic/score"),
        **reduce(add, [r.advantages for r in finished]).named("critic/advantages"),
        **reduce(add, [r.returns for r in finished]).named("critic/returns"),
    }
    if config.needs_critic:
        group.receive("critic", "returns", assignments["critic"], [r.returns_ref for r in finished])
        residuals, returns = (
            reduce(add, [r.residuals for r in finished]),
            reduce(add, [r.return_moments for r in finished]),
        )
        metrics["critic/vf_explained_var"] = explained_variance(returns, residuals)
    corrections = [r.correction for r in results if r.correction is not None]
    if corrections:
        metrics |= reduce(add, corrections).metrics()
    if kl.count:
        metrics["actor/reward_kl_penalty"], metrics["actor/reward_kl_penalty_coeff"] = kl.mean, kl_coef
    return kl, metrics


def _sample_advantages(config: AlgorithmConfig, batch: RolloutBatch, scores: Sequence[float]) -> list[float] | None:
    """One advantage an answer, from the scores alone; None: each token has its own, which the ranks compute."""
    infos = batch.infos
    if config.advantage == "remax":
        missing = [info.uid for info in infos if info.baseline is None]
        if missing:
            raise ValueError(
                f"remax needs the score of a greedy answer to each prompt, but {len(missing)} of {len(infos)} answers "
                f"have none, the first is {missing[0]}"
            )
        return remax(scores, [info.baseline for info in infos if info.baseline is not None])
    if config.advantage not in GROUP_ADVANTAGES:
        return None
    groups, lengths = [info.group for info in infos], [info.num_loss_tokens for info in infos]
    return GROUP_ADVANTAGES[config.advantage](scores, groups, lengths, config.normalise_by_std)


def _update(
    learning: Learning,
    role: str,
    schedule: StepSchedule,
    batch: RolloutBatch,
    optimizer_steps: dict[str, int],
    entropy_coef: float = 0.0,
) -> dict[str, float]:
    config, own = learning.config, _trained(learning.config, role).batch
    if role == "actor" and config.skips_old_logprobs and not config.algorithm.correction.bypass:
        assert len(schedule.mini_batches) == 1, "with more, the log-probs before the update are not those in it"
    denominators = []
    for ranks in schedule.mini_batches:
        counts = [batch.infos[i].num_loss_tokens for bins in ranks for indices in bins for i in indices]
        denominators.append((sum(counts), sum(count > 0 for count in counts)))
    per_step = config.optimizer_steps(own)
    plans = [
        UpdatePlan(
            mini_batches=[ranks[data] for ranks in schedule.mini_batches],
            denominators=denominators,
            first_step=optimizer_steps[role],
            total_steps=per_step * (learning.total_steps - (config.run.critic_warmup if role == "actor" else 0)),
            entropy_coef=entropy_coef,
        )
        for data in range(learning.group.grids[role].data_parallel_size)
    ]
    metrics = learning.group.update(role, plans)
    optimizer_steps[role] += per_step
    return metrics
