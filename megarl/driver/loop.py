"""The loop, on one page: generate, learn, sync, validate, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from megarl.algorithms import entropy as entropy_control
from megarl.algorithms import kl as kl_control
from megarl.config import Config
from megarl.data.prompts import PromptSet, PromptStream
from megarl.driver.checkpoint import CheckpointStore, DriverState
from megarl.driver.collect import Collection
from megarl.driver.drift import drift_warning
from megarl.driver.progress import Progress
from megarl.driver.rollout import DEATH_PATIENCE, ReplicaDied, Rollout, RolloutBatch
from megarl.driver.saving import Saver
from megarl.driver.step import Learning, Timer, learn, resident, role_offload
from megarl.driver.step_metrics import Flops, step_metrics, validation_metrics
from megarl.driver.stop import StopRequest
from megarl.driver.sync import WeightSync
from megarl.metrics import MetricsWriter
from megarl.rewards import is_timeout
from megarl.types import Prompt, SamplingParams
from megarl.workers.calls import WorkerError
from megarl.workers.generation import Shaping
from megarl.workers.group import TrainerGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """Everything a run consists of, built and connected."""

    config: Config
    group: TrainerGroup
    rollout: Rollout
    sync: WeightSync
    prompts: PromptStream
    validation: PromptSet | None
    stop_token_ids: tuple[int, ...]
    learning: Learning
    flops: Flops
    checkpoints: CheckpointStore
    writer: MetricsWriter
    progress: Progress
    stop: StopRequest


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    first_validation: float | None
    last_validation: float | None
    stopped_by: str | None


def run(session: Session, state: DriverState) -> Outcome:
    """Go from the state's step to the last one, or to the step in which a signal asked to stop."""
    config, rollout, progress = session.config, session.rollout, session.progress
    kl, entropy = _kl_controller(config, state.kl_coef), _entropy_controller(config, state.entropy_coef)
    optimizer_steps = dict(state.optimizer_steps)
    saver = Saver(session.group, session.checkpoints)
    first_validation, warned_at = None, 0.0
    _refresh_engine(session, state.step)
    if state.step == 0 and config.run.validate_before_training and session.validation is not None:
        metrics = validate(session, 0)
        session.writer.write(0, metrics)
        first_validation = _score(metrics)
        progress.say(f"before training: validation {first_validation:.3f}")
        state = replace(state, last_validation=first_validation)

    for step in range(state.step + 1, progress.total_steps + 1):
        start, timer = time.perf_counter(), Timer()
        with timer("gen"):
            batch, figures = _collect(session, step)
            rollout.sleep()
        check_samples(session, batch, version=step - 1)
        metrics, observed_kl = learn(session.learning, batch, step, kl.coef, optimizer_steps, timer, entropy)
        warning, warned_at = drift_warning(config, metrics, warned_at)
        if warning is not None:
            progress.say(warning)
        if observed_kl.count:
            kl = kl_control.update(kl, observed_kl.mean, len(batch.infos))
        if step > config.run.critic_warmup:
            entropy = entropy_control.update(entropy, metrics.get("actor/entropy"))
        cursor = session.prompts.state_dict()
        state = replace(
            state,
            step=step,
            data_cursor=cursor,
            optimizer_steps=dict(optimizer_steps),
            kl_coef=kl.coef,
            entropy_coef=None if config.actor.entropy_target is None else entropy.coef,
        )
        final, stopping = step == progress.total_steps, session.stop.asked is not None
        is_last = final and config.run.save_at_end
        if is_last or stopping or _is_due(step, config.run.save_every):
            with timer("save_checkpoint"):  # while the engine's memory is away
                saver.start(state)
                if final or stopping or not config.run.async_save:
                    saver.finish()
        if final or not stopping:
            with timer("update_weights"):
                metrics |= _refresh_engine(session, step)
            if session.validation is not None and (final or _is_due(step, config.run.validate_every)):
                with timer("testing"):
                    found = validate(session, step)
                metrics |= found
                state = replace(state, last_validation=_score(found))
        saver.finish_if_written()
        timer.seconds["step"] = time.perf_counter() - start
        metrics |= figures | step_metrics(config, batch, timer.seconds, session.flops, session.group.memory())
        session.writer.write(step, metrics)
        session.writer.write_histogram(step, "histogram/response_length", [i.response_length for i in batch.infos])
        throughput = metrics["perf/throughput"] * config.cluster.num_ranks
        progress.step(step, metrics["critic/score/mean"], state.last_validation, throughput)
        if stopping:
            break
    saver.finish()
    stopped_by = session.stop.asked if state.step < progress.total_steps else None
    return Outcome(state.step, first_validation, state.last_validation, stopped_by)


def check_samples(session: Session, batch: RolloutBatch, version: int) -> None:
    """The batch is worth learning from.

    Raises:
        ValueError: the reward function failed on every answer; with the first reason.
        RuntimeError: an answer was written by other weights than the last sync brought.
    """
    stale = [i.uid for i in batch.infos if i.response_length and i.min_weight_version != version]
    if stale:
        raise RuntimeError(
            f"{len(stale)} of {len(batch.infos)} answers do not come from the weights of step {version}, the first is "
            f"{stale[0]}: the rollout engine is behind"
        )
    failures = [i.reward_error for i in batch.infos if i.reward_error is not None]
    if len(failures) == len(batch.infos):
        raise ValueError(f"reward.function {session.config.reward.function} failed on every answer: {failures[0]}")
    if failures:
        late = sum(map(is_timeout, failures))
        of_these = f" ({late} timed out)" if late else ""
        session.progress.say(
            f"the reward failed on {len(failures)} of {len(batch.infos)} answers{of_these}: {failures[0]}"
        )


def _is_due(step: int, every: int) -> bool:
    """every 0: never."""
    return bool(every) and step % every == 0


def validate(session: Session, step: int) -> dict[str, float]:
    """Answer the validation prompts with the current weights; metrics by data source, and some answers as text."""
    assert session.validation is not None, "no validation data"
    config, own = session.config, session.config.rollout.validation
    sampling = SamplingParams(
        config.data.max_response_length, own.temperature, own.top_p, own.top_k, session.stop_token_ids
    )
    with_texts = config.run.log_samples > 0
    session.rollout.submit(
        session.validation.prompts,
        own.n,
        sampling,
        config.run.seed + step,
        config.reward.validation_function,
        with_texts,
    )
    batch = _outlive(session, step, session.rollout.next_batch)
    shown = list(zip(batch.texts, batch.scores, strict=False))[: config.run.log_samples]
    session.writer.write_texts(
        step,
        "samples",
        {str(i): f"{prompt}**{answer}**\n\nscore {score}" for i, ((prompt, answer), score) in enumerate(shown)},
    )
    return validation_metrics(batch, own.n)


def _collect(session: Session, step: int) -> tuple[RolloutBatch, dict[str, float]]:
    """The step's batch, from the weights of the step before."""
    config, rollout = session.config, session.rollout

    def ask(prompts: list[Prompt]) -> None:
        own, reward = config.rollout, config.reward
        rollout.submit(
            prompts,
            own.n,
            _sampling(session),
            config.run.seed,
            reward.function,
            with_baseline=config.needs_greedy_baseline,
            shaping=Shaping(
                config.data.max_response_length, reward.overlong_buffer, reward.overlong_factor, reward.mask_truncated
            ),
        )

    return _outlive(session, step - 1, Collection(config, session.prompts, rollout, ask).collect)


def _outlive(session: Session, version: int, work: Callable[[], T]) -> T:
    """The result of work that a replica's death may end: the dead are replaced, and it goes on with the same
    weights."""
    while True:
        try:
            return work()
        except ReplicaDied:
            _refresh_engine(session, version)


def _refresh_engine(session: Session, version: int) -> dict[str, float]:
    """Sync the engine. Replicas that are dead, or die in it, are replaced, and all are synced again.

    Raises:
        WorkerError: it failed for another reason, or more replicas have died than run.max_replica_restarts.
    """
    while True:
        try:
            _replace_dead(session)
            return _sync_engine(session, version)
        except WorkerError:
            if not session.rollout.find_dead(DEATH_PATIENCE):
                raise


def _replace_dead(session: Session) -> None:
    """Start new replicas in the place of dead ones, plan the sync with them, and give all replicas' memory back."""
    dead = session.rollout.find_dead()
    if not dead:
        return
    if role_offload(session.config, "actor").parameters:  # a sync that failed has left them there
        session.group.call("moving the actor to the host", "release", "actor", ["parameters"])
    session.group.call("freeing cached memory", "empty_cache")
    for message in session.rollout.replace(dead):
        session.progress.say(message)
    session.sync.prepare()
    session.rollout.sleep()


def _sync_engine(session: Session, version: int) -> dict[str, float]:
    """Memory in the order of a colocated engine: optimizer, gradients and what the allocator kept are off, weights on,
    sync, parameters off, KV cache on."""
    if not session.rollout.embedded:
        session.group.call("freeing cached memory", "empty_cache")
    session.rollout.wake_weights()
    with resident(session.group, "actor", session.config, training=False):
        timings = session.sync.run(version)
    session.rollout.resume()
    return timings


def _sampling(session: Session) -> SamplingParams:
    own = session.config.rollout
    stops = () if own.ignore_eos else session.stop_token_ids
    return SamplingParams(
        session.config.data.max_response_length, own.temperature, own.top_p, own.top_k, stops, own.ignore_eos
    )


def _kl_controller(config: Config, coef: float) -> kl_control.KLController:
    if config.algorithm.kl_target is None:
        return kl_control.FixedKLController(config.algorithm.kl_in_reward_coef)
    return kl_control.AdaptiveKLController(coef, config.algorithm.kl_target, config.algorithm.kl_horizon)


def _entropy_controller(config: Config, coef: float | None) -> entropy_control.EntropyController:
    own = config.actor
    if own.entropy_target is None:
        return entropy_control.FixedEntropyController(own.entropy_coef)
    coef = own.entropy_coef if coef is None else coef
    return entropy_control.AdaptiveEntropyController(coef, own.entropy_target, own.entropy_coef_step)


def _score(metrics: dict[str, float]) -> float:
    """The validation score that the progress line shows: the mean over all data."""
    return metrics["val-aux/all/reward/mean"]
