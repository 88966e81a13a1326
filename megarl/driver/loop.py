"""The loop, on one page: generate, learn, sync, validate, save."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib import metadata

from megarl.algorithms import kl as kl_control
from megarl.config import Config
from megarl.data.prompts import PromptSet, PromptStream
from megarl.driver.checkpoint import CheckpointStore, DriverState
from megarl.driver.progress import Progress
from megarl.driver.rollout import DEATH_PATIENCE, ReplicaDied, Rollout, RolloutBatch
from megarl.driver.step import Learning, Timer, learn, resident, role_offload
from megarl.driver.step_metrics import Flops, step_metrics, validation_metrics
from megarl.driver.stop import StopRequest
from megarl.driver.sync import WeightSync
from megarl.metrics import MetricsWriter
from megarl.rewards import is_timeout
from megarl.types import SamplingParams
from megarl.workers.calls import WorkerError
from megarl.workers.group import TrainerGroup

VERSIONS = ("megarl", "torch", "megatron-core", "sglang", "transformers", "ray")


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
    kl = _kl_controller(config, state.kl_coef)
    optimizer_steps = dict(state.optimizer_steps)
    first_validation = None
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
            rollout.submit(
                session.prompts.next(), config.rollout.n, _sampling(session), config.run.seed, config.reward.function
            )
            batch = _next_batch(session, version=step - 1)
            rollout.sleep()
        check_samples(session, batch, version=step - 1)
        metrics, observed_kl = learn(session.learning, batch, step, kl.coef, optimizer_steps, timer)
        if observed_kl.count:
            kl = kl_control.update(kl, observed_kl.mean, len(batch.infos))
        cursor = session.prompts.state_dict()
        state = replace(state, step=step, data_cursor=cursor, optimizer_steps=dict(optimizer_steps), kl_coef=kl.coef)
        final, stopping = step == progress.total_steps, session.stop.asked is not None
        if final or stopping or _is_due(step, config.run.save_every):
            with timer("save_checkpoint"):  # while the engine's memory is away
                save(session, state)
        if final or not stopping:
            with timer("update_weights"):
                metrics |= _refresh_engine(session, step)
            if session.validation is not None and (final or _is_due(step, config.run.validate_every)):
                with timer("testing"):
                    found = validate(session, step)
                metrics |= found
                state = replace(state, last_validation=_score(found))
        timer.seconds["step"] = time.perf_counter() - start
        metrics |= step_metrics(config, batch, timer.seconds, session.flops, session.group.memory())
        session.writer.write(step, metrics)
        session.writer.write_histogram(step, "histogram/response_length", [i.response_length for i in batch.infos])
        throughput = metrics["perf/throughput"] * config.cluster.num_ranks
        progress.step(step, metrics["critic/score/mean"], state.last_validation, throughput)
        if stopping:
            break
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
    batch = _next_batch(session, step)
    shown = list(zip(batch.texts, batch.scores, strict=False))[: config.run.log_samples]
    session.writer.write_texts(
        step,
        "samples",
        {str(i): f"{prompt}**{answer}**\n\nscore {score}" for i, ((prompt, answer), score) in enumerate(shown)},
    )
    return validation_metrics(batch, own.n)


def save(session: Session, state: DriverState) -> str:
    """Write a checkpoint of every role and of the driver."""
    folder = session.checkpoints.begin(state.step)
    session.group.call("saving a checkpoint", "save_checkpoint", folder)
    return session.checkpoints.commit(folder, replace(state, versions=versions()))


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _next_batch(session: Session, version: int) -> RolloutBatch:
    """The batch that was submitted first. Replicas that die meanwhile are replaced, and their prompts are run again
    with the same weights."""
    while True:
        try:
            return session.rollout.next_batch()
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


def _score(metrics: dict[str, float]) -> float:
    """The validation score that the progress line shows: the mean over all data."""
    return metrics["val-aux/all/reward/mean"]
