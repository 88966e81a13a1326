"""The loop with everything around it faked: what comes when, what is saved, and how it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl import config
from megarl.algorithms.advantages import Moments
from megarl.data.prompts import PromptSet
from megarl.driver import loop
from megarl.driver.checkpoint import CheckpointStore, DriverState, read_state
from megarl.driver.loop import Session, run
from megarl.driver.rollout import ReplicaDied, RolloutBatch
from megarl.driver.step_metrics import Flops
from megarl.driver.stop import StopRequest
from megarl.metrics import MetricsWriter, read_metrics
from megarl.types import Prompt, SampleInfo
from megarl.workers.calls import WorkerError
from megarl.workers.generation import Group, Shaping

UNVALIDATED = {"validate_before_training": False}
START = DriverState(0, {"row": 0}, {"actor": 0, "critic": 0}, 0.5)


class World:
    """Group, rollout, sync, prompts and progress in one: each call is an entry of `events`."""

    def __init__(self, folder: Path, total_steps: int, scores: list[float], **sections: Any) -> None:
        one = {"mini_batch_prompts": 1}
        self.config = config.build(
            {
                "model": {"create": {}},
                "data": {"create": {}, "prompts_per_step": 1},
                **sections,
                "actor": {"batch": one, **sections.get("actor", {})},
                "critic": {"batch": one, **sections.get("critic", {})},
                "run": {"dir": str(folder), "log_samples": 1, **sections.get("run", {})},
            }
        )
        self.events: list[str] = []
        self.validation_scores = iter(scores)
        self.row, self.stop, self.stop_in, self.total_steps = 0, StopRequest(), 0, total_steps
        self.texts: list[Any] = []
        self.submitted: list[Prompt] = []
        self.ended: dict[int, Group] = {}
        self.learned: list[tuple[int, float]] = []
        self.is_behind, self.reward_errors, self.embedded = 0, [None], False
        self.dead: dict[int, str] = {}
        self.deaths: dict[str, int] = {}
        """By what goes on ("submit training", "sync 1"), how many replicas die in it, one after the other."""

    def session(self, first_step: int = 0) -> Session:
        self.checkpoints = CheckpointStore(self.config.run.folder, self.config.run.keep_checkpoints)
        self.writer = MetricsWriter(self.config.run.folder, first_step)
        progress = SimpleNamespace(
            total_steps=self.total_steps, say=self.texts.append, step=lambda *line: self.texts.append(line)
        )
        return Session(
            config=self.config,
            group=SimpleNamespace(memory=dict, call=self.call),  # type: ignore[arg-type]
            rollout=self,  # type: ignore[arg-type]
            sync=SimpleNamespace(run=self.sync, prepare=lambda: self.events.append("plan")),  # type: ignore[arg-type]
            prompts=SimpleNamespace(  # type: ignore[arg-type]
                next=self.next, put_back=self.put_back, state_dict=lambda: {"row": self.row}
            ),
            validation=PromptSet((Prompt("v-0", np.array([1]), "validation", ""),)),
            stop_token_ids=(2,),
            learning=None,  # type: ignore[arg-type]
            flops=Flops(None, None, None),
            checkpoints=self.checkpoints,
            writer=self.writer,
            progress=progress,  # type: ignore[arg-type]
            stop=self.stop,
        )

    def call(self, stage: str, method: str, *arguments: Any) -> list[Any]:
        self.events.append(method)
        if method == "is_saved":
            self.looks += 1
            return [self.looks >= 2, True]
        if method == "start_save":
            self.looks = 0
            Path(arguments[0], "weights").write_text("w")
        return []

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        self.events.append(f"sync {version}")
        self.die_in(f"sync {version}", WorkerError("weight sync: a rank went away"))
        return {}

    def die_in(self, what: str, error: WorkerError) -> None:
        if self.deaths.get(what, 0) > 0:
            self.deaths[what] -= 1
            self.dead = {1: "killed"}
            raise error

    def find_dead(self, patience: float | None = None) -> dict[int, str]:
        return self.dead

    def replace(self, dead: dict[int, str]) -> list[str]:
        assert dead == self.dead
        self.events.append("replace 1")
        self.dead = {}
        return [f"replica 1 was replaced: {dead[1]}"]

    def next(self, count: int) -> list[Prompt]:
        rows = range(self.row, self.row + count)
        self.row = rows.stop
        return [Prompt(f"0-{row}", np.array([1]), "training", "") for row in rows]

    def put_back(self, prompts: list[Prompt]) -> None:
        self.row -= len(prompts)

    def submit(
        self,
        prompts: list[Prompt],
        n: int,
        sampling: Any,
        seed: int,
        reward: str,
        with_texts: bool = False,
        with_baseline: bool = False,
        shaping: Shaping | None = None,
    ) -> None:
        self.submitted, self.what = [*self.submitted, *prompts], prompts[0].data_source
        self.asked = (n, sampling, seed, reward, with_texts, with_baseline, shaping)
        if self.what == "training":
            self.asked_of_training = self.asked
        self.events.append(f"submit {self.what}")

    @property
    def num_open(self) -> int:
        return len(self.submitted) - len(self.ended)

    def wait(self, at_least: int) -> None:
        self.die_in(f"submit {self.what}", ReplicaDied("generation: SGLang replica 1 failed"))
        for number in [n for n in range(len(self.submitted)) if n not in self.ended][:at_least]:
            self.ended[number] = self.group(self.submitted[number])

    def group(self, prompt: Prompt) -> Group:
        is_validation = prompt.data_source == "validation"
        score = next(self.validation_scores) if is_validation else 1.0
        version = self.version - self.is_behind
        infos = tuple(
            SampleInfo(f"u{i}", prompt.uid, 2, 3, 3, score, "stop", "s", version, error)
            for i, error in enumerate([None] if is_validation else self.reward_errors)
        )
        return Group(infos, None, (("2+2=", "4"),) if is_validation else ())

    def finish(self, numbers: list[int]) -> tuple[RolloutBatch, list[Any]]:
        batch = RolloutBatch([self.ended[number] for number in numbers])
        left = [None] * self.num_open
        self.submitted, self.ended = [], {}
        return batch, left

    def next_batch(self) -> RolloutBatch:
        self.wait(self.num_open)
        return self.finish(list(self.ended))[0]

    def sleep(self) -> None:
        self.events.append("sleep")

    def wake_weights(self) -> None:
        self.events.append("wake weights")

    def resume(self) -> None:
        self.events.append("wake kv_cache")


@pytest.fixture(autouse=True)
def learn(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """`learn` notes the step and the KL coefficient, counts one optimizer step, and has seen a KL of 3."""
    worlds: list[World] = []

    def fake(
        learning: Any,
        batch: Any,
        step: int,
        kl_coef: float,
        optimizer_steps: dict[str, int],
        timer: Any,
        entropy: Any = None,
    ) -> Any:
        worlds[0].events.append(f"learn {step}")
        worlds[0].learned.append((step, kl_coef))
        optimizer_steps["actor"] += 1
        if step == worlds[0].stop_in:
            worlds[0].stop.asked = "SIGTERM"
        return {"critic/score/mean": 1.0}, Moments(2, 6.0, 18.0)

    monkeypatch.setattr(loop, "learn", fake)
    return worlds


def world(worlds: list[World], *arguments: Any, **sections: Any) -> World:
    made = World(*arguments, **sections)
    worlds.append(made)
    return made


def test_the_order_of_a_step_is_that_of_a_colocated_engine(tmp_path: Path, learn: list[World]) -> None:
    """Optimizer and gradients are off (never on here), weights on, sync, actor parameters off, KV cache on."""
    made = world(learn, tmp_path, 1, [0.25, 0.75], actor={"offload": {"parameters": True, "optimizer": True}})
    outcome = run(made.session(), START)
    refresh = ["empty_cache", "wake weights", "resume", "sync {}", "release", "wake kv_cache"]
    assert made.events == [
        *(event.format(0) for event in refresh),
        "submit validation",
        "submit training",
        "sleep",
        "learn 1",
        "start_save",
        "finish_save",
        *(event.format(1) for event in refresh),
        "submit validation",
    ]
    assert (outcome.step, outcome.first_validation, outcome.last_validation, outcome.stopped_by) == (
        1,
        0.25,
        0.75,
        None,
    )
    assert made.texts[0] == "before training: validation 0.250"
    n, sampling, seed, reward, with_texts, with_baseline, shaping = made.asked
    own = made.config.rollout.validation
    assert (n, sampling.temperature, with_texts, with_baseline, shaping) == (own.n, 0.0, True, False, None)
    assert (seed, reward) == (made.config.run.seed + 1, made.config.reward.validation_function)


def test_training_answers_are_asked_for_with_what_their_advantage_and_their_score_need(
    tmp_path: Path, learn: list[World]
) -> None:
    """A greedy answer more for remax; and the limits of DAPO's soft punishment."""
    made = world(
        learn,
        tmp_path,
        1,
        [0.0],
        algorithm={"advantage": "remax"},
        rollout={"n": 2},
        reward={"overlong_buffer": 16, "overlong_factor": 0.5, "mask_truncated": True},
        run=UNVALIDATED,
    )
    run(made.session(), START)
    n, sampling, seed, reward, with_texts, with_baseline, shaping = made.asked_of_training
    assert (n, sampling.temperature, with_texts, with_baseline) == (2, 1.0, False, True)
    assert (seed, reward) == (made.config.run.seed, made.config.reward.function)
    assert shaping == Shaping(made.config.data.max_response_length, 16, 0.5, True)


def test_more_prompts_are_asked_than_a_step_needs_and_what_was_not_used_is_in_the_cursor(
    tmp_path: Path, learn: list[World]
) -> None:
    """Three prompts for a step of one: two come again. The metrics say so."""
    made = world(learn, tmp_path, 2, [0.0, 0.0], rollout={"oversample": 3.0})
    run(made.session(), START)
    first, *steps = read_metrics(made.writer.jsonl)
    assert [entry["rollout/asked_prompts"] for entry in steps] == [3.0, 3.0]
    assert [entry["rollout/unanswered_prompts"] for entry in steps] == [2.0, 2.0]
    assert "rollout/asked_prompts" not in first  # validation
    (state,) = (read_state(folder) for folder in made.checkpoints.complete())
    assert state.data_cursor == {"row": 2}


def test_groups_of_equal_scores_are_asked_for_again_within_a_step(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 1, [0.0], rollout={"keep_groups": "mixed", "n": 2, "max_refills": 2}, run=UNVALIDATED)
    run(made.session(), START)
    assert made.events.count("submit training") == 3
    entry = read_metrics(made.writer.jsonl)[0]
    assert (entry["rollout/equal_groups"], entry["rollout/refills"], entry["rollout/asked_prompts"]) == (3.0, 2.0, 3.0)


def test_saving_and_validating_every_so_often(tmp_path: Path, learn: list[World]) -> None:
    """Seven steps, saved every three, validated every two; both at the end too."""
    made = world(
        learn, tmp_path, 7, [0.0, 0.2, 0.6, 0.4, 0.5], run={"save_every": 3, "validate_every": 2, "keep_checkpoints": 0}
    )
    run(made.session(), START)
    states = [read_state(folder) for folder in made.checkpoints.complete()]
    assert [state.step for state in states] == [3, 6, 7]
    assert [state.last_validation for state in states] == [0.2, 0.6, 0.4]  # saved before the step's own validation
    # What the driver needs to go on: rows taken, optimizer steps done, versions of what decided the numbers.
    assert [(state.data_cursor, state.optimizer_steps["actor"]) for state in states] == [
        ({"row": n}, n) for n in (3, 6, 7)
    ]
    assert states[0].versions["torch"]
    entries = read_metrics(made.writer.jsonl)
    assert [entry["step"] for entry in entries] == list(range(8))
    assert [e["step"] for e in entries if "val-aux/all/reward/mean" in e] == [0, 2, 4, 6, 7]
    for entry in entries[1:]:
        stages = sum(entry[f"timing_s/{stage}"] for stage in ("gen", "update_weights"))
        assert stages <= entry["timing_s/step"]
        assert ("timing_s/save_checkpoint" in entry) == (entry["step"] in (3, 6, 7))


@pytest.mark.parametrize("is_async", [True, False])
def test_files_are_written_while_training_goes_on(tmp_path: Path, learn: list[World], is_async: bool) -> None:
    """Saved in every second of five steps, and at the end. Files are there at the second look, a step later, and with
    them the checkpoint; that of the last step before the run ends."""
    made = world(learn, tmp_path, 5, [0.0] * 9, run={"save_every": 2, "async_save": is_async, **UNVALIDATED})
    session, complete = made.session(), []

    class Steps(list[Any]):
        def append(self, step: Any) -> None:
            complete.append(len(made.checkpoints.complete()))
            super().append(step)

    made.learned = Steps()
    run(session, START)
    saves = [event for event in made.events if event in ("start_save", "is_saved", "finish_save")]
    first, second = (["is_saved", "is_saved"], ["is_saved"]) if is_async else ([], [])
    one, two = ["start_save", *first, "finish_save"], ["start_save", *second, "finish_save"]
    assert saves == [*one, *two, "start_save", "finish_save"]
    assert complete == ([0, 0, 0, 1, 1] if is_async else [0, 0, 1, 1, 2])
    assert [read_state(folder).step for folder in made.checkpoints.complete()] == [2, 4, 5]


def test_a_signal_lets_the_step_end_and_saves_at_once(tmp_path: Path, learn: list[World]) -> None:
    """No sync and no validation after it: who sends SIGTERM waits seconds, not minutes."""
    made = world(learn, tmp_path, 9, [0.25])
    made.stop_in = 2
    outcome = run(made.session(), START)
    assert (outcome.step, outcome.last_validation, outcome.stopped_by) == (2, 0.25, "SIGTERM")
    assert made.events[-3:] == ["learn 2", "start_save", "finish_save"]
    assert [read_state(folder).step for folder in made.checkpoints.complete()] == [2]
    assert [entry["step"] for entry in read_metrics(made.writer.jsonl)] == [0, 1, 2]


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 2, [0.25, 0.5])
    made.stop_in = 2
    outcome = run(made.session(), START)
    assert (outcome.step, outcome.last_validation, outcome.stopped_by) == (2, 0.5, None)


def test_answers_of_other_weights_stop_the_run(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 2, [0.25])
    made.is_behind = 1
    with pytest.raises(RuntimeError, match="1 of 1 answers do not come from the weights of step 0, the first is u0"):
        run(made.session(), START)


def test_a_reward_that_fails_is_said_and_one_that_fails_on_all_stops_the_run(
    tmp_path: Path, learn: list[World]
) -> None:
    made = world(learn, tmp_path / "some", 1, [0.25, 0.5])
    made.reward_errors = [None, "KeyError: 'x'"]
    run(made.session(), START)
    assert "the reward failed on 1 of 2 answers: KeyError: 'x'" in made.texts
    learn.clear()
    made = world(learn, tmp_path / "late", 1, [0.25, 0.5])
    made.reward_errors = [None, "KeyError: 'x'", "reward timed out after 5 s"]
    run(made.session(), START)
    assert "the reward failed on 2 of 3 answers (1 timed out): KeyError: 'x'" in made.texts
    learn.clear()
    made = world(learn, tmp_path / "all", 1, [0.25])
    made.reward_errors = ["KeyError: 'x'"] * 2
    with pytest.raises(ValueError, match="reward.function gsm8k failed on every answer: KeyError: 'x'"):
        run(made.session(), START)
    assert made.learned == []


def test_a_resumed_run_starts_after_its_step_without_validating_first(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 4, [0.5])
    outcome = run(made.session(2), DriverState(2, {}, {"actor": 8, "critic": 8}, 0.5, 0.6))
    assert [step for step, _ in made.learned] == [3, 4]
    assert made.events[:3] == ["empty_cache", "wake weights", "sync 2"]
    assert "submit validation" not in made.events[: made.events.index("learn 4")]
    assert (outcome.first_validation, outcome.last_validation) == (None, 0.5)
    # A run that was done has nothing to do again.
    done = run(made.session(4), DriverState(4, {}, {"actor": 8, "critic": 8}, 0.5, 0.6))
    assert (done.step, done.last_validation) == (4, 0.6)


def test_the_kl_coefficient_follows_its_target(tmp_path: Path, learn: list[World]) -> None:
    """A KL of 3 against a target of 2 is 50 % too high, counted as 20 %; over one sample of a horizon of 10: x 1.02."""
    sections = {"algorithm": {"kl_in_reward_coef": 0.5, "kl_target": 2.0, "kl_horizon": 10}}
    made = world(learn, tmp_path, 3, [0.0, 0.0], **sections)
    run(made.session(), START)
    assert [coef for _, coef in made.learned] == pytest.approx([0.5, 0.51, 0.5202])
    assert read_state(made.checkpoints.complete()[0]).kl_coef == pytest.approx(0.530604)


def test_answers_of_a_benchmark_end_at_nothing_and_those_of_validation_as_ever(
    tmp_path: Path, learn: list[World]
) -> None:
    made = world(learn, tmp_path, 1, [0.5], rollout={"ignore_eos": True})
    session = made.session()
    sampling = loop._sampling(session)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((), True)
    made.version, made.is_behind = 0, 0
    loop.validate(session, 0)
    assert (made.asked[1].stop_token_ids, made.asked[1].ignore_eos) == ((2,), False)


ANEW = ["release", "empty_cache", "replace 1", "plan", "sleep"]
REFRESH = ["empty_cache", "wake weights", "resume", "sync {}", "release", "wake kv_cache"]
OFFLOADED = {"offload": {"parameters": True, "optimizer": True}}


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_replica_that_dies_while_it_generates_is_replaced_and_takes_the_same_weights(
    tmp_path: Path, learn: list[World], deaths: int
) -> None:
    made = world(learn, tmp_path, 1, [0.5], actor=OFFLOADED, run={"validate_before_training": False})
    made.deaths = {"submit training": deaths, "submit validation": deaths}
    run(made.session(), START)
    training, validation = ([*ANEW, *(event.format(version) for event in REFRESH)] for version in (0, 1))
    assert made.events == [
        *(event.format(0) for event in REFRESH),
        *("submit training", *(training * deaths), "sleep", "learn 1", "start_save", "finish_save"),
        *(event.format(1) for event in REFRESH),
        *("submit validation", *(validation * deaths)),
    ]
    assert made.texts.count("replica 1 was replaced: killed") == 2 * deaths


def test_a_replica_that_dies_in_a_sync_is_replaced_and_all_are_synced_again(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 1, [0.5], actor=OFFLOADED, run={"validate_before_training": False})
    made.deaths = {"sync 1": 1}
    run(made.session(), START)
    failed = ["empty_cache", "wake weights", "resume", "sync 1"]
    assert made.events[made.events.index("finish_save") + 1 :] == [
        *(*failed, *ANEW, *(event.format(1) for event in REFRESH), "submit validation"),
    ]


def test_a_sync_that_fails_with_all_replicas_alive_ends_the_run(tmp_path: Path, learn: list[World]) -> None:
    made = world(learn, tmp_path, 1, [0.5])
    made.deaths = {"sync 0": 1}
    made.find_dead = lambda patience=None: {}  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="weight sync: a rank went away"):
        run(made.session(), START)
    assert made.events.count("sync 0") == 1
