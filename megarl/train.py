"""The entry point of training: load the configuration, start Ray, build the session, run the loop, save the model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from megarl import cli
from megarl import config as configuration
from megarl.config import Config
from megarl.driver import setup
from megarl.driver.loop import Outcome, Session, run
from megarl.driver.stop import StopRequest
from megarl.workers.calls import WorkerError


def train(config: Config) -> Outcome:
    """Train as the configuration says.

    Raises:
        ValueError: something is wrong with the data, the model or the settings.
        WorkerError: a process failed; names its rank, host and stage.
    """
    created = setup.create_inputs(config)
    inputs = setup.prepare(created)
    os.makedirs(config.run.folder, exist_ok=True)
    (Path(config.run.folder) / "config.yaml").write_text(configuration.to_yaml(config))
    start_ray(config)
    try:
        with StopRequest() as stop:  # after Ray, which takes SIGTERM for itself when it starts
            session = setup.build(created, inputs, stop)
            try:
                outcome = run(session, inputs.state)
                finished = outcome.stopped_by is None
                model = save_model(session) if finished and config.run.save_model else None
                report_end(session, outcome, model)
            finally:
                session.writer.close()
            session.rollout.shutdown()
            session.group.shutdown()
            return outcome
    finally:
        ray.shutdown()


def start_ray(config: Config) -> None:
    """Start Ray on this machine, or join the cluster at cluster.address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = (
        {"address": config.cluster.address}
        if config.cluster.address
        else {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, 4)}
    )
    ray.init(log_to_driver=False, logging_level="error", **options)


def save_model(session: Session) -> str:
    """Write the trained actor as a Hugging Face folder into the run folder."""
    folder = os.path.abspath(os.path.join(session.config.run.folder, "model"))
    session.group.call("bringing the actor to the GPU", "resume", "actor", ["parameters"])
    session.group.call("saving the model", "save_hf", "actor", session.config.model.path, folder)
    return folder


def report_end(session: Session, outcome: Outcome, model: str | None) -> None:
    """One line: what was learned, and where the TensorBoard files and the model are."""
    first = "-" if outcome.first_validation is None else f"{outcome.first_validation:.3f}"
    last = "-" if outcome.last_validation is None else f"{outcome.last_validation:.3f}"
    how = f"stopped by {outcome.stopped_by} after" if outcome.stopped_by else "done:"
    session.progress.say(
        f"{how} step {outcome.step}, validation {first} -> {last}; "
        f"TensorBoard {os.path.abspath(session.writer.tensorboard_folder)}; model {model or 'not saved'}"
    )


def run_training(config: Config) -> int:
    """Train, and turn what users can mend into a message and an exit code."""
    try:
        outcome = train(config)
    except (ValueError, OSError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint is whole, and the same command resumes from it", file=sys.stderr)
        return 128 + signal.SIGINT
    # As a shell reports it: a run that was asked to stop has not done all its steps.
    return 128 + signal.Signals[outcome.stopped_by] if outcome.stopped_by else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m megarl.train CONFIG [key=value ...]` is `megarl train CONFIG [key=value ...]`."""
    return cli.main(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
