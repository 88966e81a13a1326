"""A shortened quickstart: the score rises; a stopped and resumed run equals one that never stopped; the model that is
saved answers like the trained actor."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e import runs

STEPS = 12
SHORT = (f"run.total_steps={STEPS}", "run.validate_every=4", "run.save_every=4", "run.keep_checkpoints=9")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, runs.train(str(runs.QUICKSTART), *SHORT, f"run.dir={folder}")


def test_the_score_rises(unbroken: tuple[Path, str]) -> None:
    folder, output = unbroken
    found = runs.metrics(folder)
    assert found[0]["val-aux/all/reward/mean"] < 0.2
    assert found[STEPS]["val-aux/all/reward/mean"] > 0.4
    assert f"validation {found[0]['val-aux/all/reward/mean']:.3f} -> " in output.splitlines()[-1]


def test_engine_and_trainer_agree_after_every_sync(unbroken: tuple[Path, str]) -> None:
    for step, entry in runs.metrics(unbroken[0]).items():
        if step > 0:
            assert entry["training/rollout_logprobs_abs_diff_mean"] < 1e-4, step


def test_a_stopped_and_resumed_run_equals_one_that_never_stopped(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """SIGTERM in the middle saves first; what follows is equal to the bit, and nothing is trained twice."""

    def stop_after_step_5(process: subprocess.Popen[str], line: str) -> None:
        if line.startswith("step  5/"):
            process.send_signal(signal.SIGTERM)

    arguments = (str(runs.QUICKSTART), *SHORT, f"run.dir={tmp_path}")
    output = runs.train(*arguments, watch=stop_after_step_5)
    assert "stopped by SIGTERM after step 6" in output
    resumed = runs.train(*arguments)
    assert "after step 6" in resumed
    assert "step  6/" not in resumed

    expected, found = runs.metrics(unbroken[0]), runs.metrics(tmp_path)
    assert sorted(found) == sorted(expected)
    for step in range(1, STEPS + 1):
        common = expected[step].keys() & found[step].keys()
        assert expected[step].keys() - common == set()
        # The stopped run validated in its last step, which the other did not.
        assert all(name.startswith("val-") for name in found[step].keys() - common)
        different = {
            name: (expected[step][name], found[step][name])
            for name in common
            if expected[step][name] != found[step][name]
        }
        assert not different, (step, different)


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_last_checkpoint_and_equals_one_that_never_stopped(
    unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    """SIGKILL of the driver in step 7: steps 5 and 6 are done again, from the checkpoint of step 4."""

    def kill_after_step_6(process: subprocess.Popen[str], line: str) -> None:
        if line.startswith("step  6/"):
            process.kill()

    arguments = (str(runs.QUICKSTART), *SHORT, f"run.dir={tmp_path}")
    with pytest.raises(AssertionError, match="exit -9"):
        runs.train(*arguments, watch=kill_after_step_6)
    assert "after step 4" in runs.train(*arguments)
    assert runs.metrics(tmp_path) == runs.metrics(unbroken[0])


def test_the_saved_model_answers_like_the_trained_actor(unbroken: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megarl.data.prompts import load_rows

    folder, _ = unbroken
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = load_rows([folder / "created" / "data" / "validation.parquet"])
    right = 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row.prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row.ground_truth
    assert right / len(rows) == pytest.approx(runs.metrics(folder)[STEPS]["val-aux/all/reward/mean"])


def test_tensorboard_holds_the_metrics(unbroken: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = unbroken
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    expected = runs.metrics(folder)
    for name in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "response_length/mean", "global_seqlen/mean"):
        found = {e.step: e.value for e in events.Scalars(name)}
        assert found == pytest.approx({s: e[name] for s, e in expected.items() if s > 0}, rel=1e-6)
