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
from megarl.driver.rollout import Rollout
from megarl.driver.step import Learning, Timer, learn, resident
from megarl.driver.step_metrics import Flops, step_metrics, validation_metrics
from megarl.driver.stop import StopRequest
from megarl.driver.sync import WeightSync
from megarl.metrics import MetricsWriter
from megarl.types import SamplingParams
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
        state = replace(state, best_validation=first_validation, last_validation=first_validation)

    for step in range(state.step + 1, progress.total_steps + 1):
        start, timer = time.perf_counter(), Timer()
        with timer("gen"):
            rollout.submit(
                session.prompts.next(), config.rollout.n, _sampling(session), config.run.seed, config.reward.function
            )
            batch = rollout.next_batch()
            rollout.sleep()
        metrics, observed_kl = learn(session.learning, batch, step, kl.coef, optimizer_steps, timer)
        if observed_kl.count:
            kl = kl_control.update(kl, observed_kl.mean, len(batch.infos))
        with timer("update_weights"):
            metrics |= _refresh_engine(session, step)
        last = step == progress.total_steps or session.stop.asked is not None
        if session.validation is not None and (
            last or (config.run.validate_every and step % config.run.validate_every == 0)
        ):
            with timer("testing"):
                found = validate(session, step)
            metrics |= found
            score = _score(found)
            best = score if state.best_validation is None else max(score, state.best_validation)
            state = replace(state, last_validation=score, best_validation=best)
        state = replace(
            state,
            step=step,
            data_cursor=session.prompts.state_dict(),
            optimizer_steps=dict(optimizer_steps),
            kl_coef=kl.coef,
        )
        if last or (config.run.save_every and step % config.run.save_every == 0):
            with timer("save_checkpoint"):
                save(session, state)
        timer.seconds["step"] = time.perf_counter() - start
        metrics |= step_metrics(config, batch, timer.seconds, session.flops, session.group.memory())
        session.writer.write(step, metrics)
        session.writer.write_histogram(step, "histogram/response_length", [i.response_length for i in batch.infos])
        progress.step(
            step,
            metrics["critic/score/mean"],
            state.last_validation,
            metrics["perf/throughput"] * config.cluster.num_ranks,
        )
        if last:
            break
    return Outcome(state.step, first_validation, state.last_validation, session.stop.asked)


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
    batch = session.rollout.next_batch()
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


def _refresh_engine(session: Session, version: int) -> dict[str, float]:
    """Memory in the order of a colocated engine: optimizer and gradients are off, weights on, sync, parameters off,
    KV cache on."""
    session.rollout.wake_weights()
    with resident(session.group, "actor", session.config, training=False):
        timings = session.sync.run(version)
    session.rollout.resume()
    return timings


def _sampling(session: Session) -> SamplingParams:
    own = session.config.rollout
    return SamplingParams(
        session.config.data.max_response_length, own.temperature, own.top_p, own.top_k, session.stop_token_ids
    )


def _kl_controller(config: Config, coef: float) -> kl_control.KLController:
    if config.algorithm.kl_target is None:
        return kl_control.FixedKLController(coef)
    return kl_control.AdaptiveKLController(coef, config.algorithm.kl_target, config.algorithm.kl_horizon)


def _score(metrics: dict[str, float]) -> float:
    """The validation score that the progress line shows: the mean over all data."""
    return metrics["val-aux/all/reward/mean"]
