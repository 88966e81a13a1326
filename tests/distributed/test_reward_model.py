"""The reward model's role against transformers' sequence classification: the same scores in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl import config
from megarl.config import ParallelConfig
from megarl.data.tiny import write_tiny_tokenizer
from megarl.parallel.topology import RankGrid
from megarl.types import Sample
from megarl.workers.step_store import StepStore
from megarl.workers.trainer import TrainerWorker
from tests.reward_models import write_reward_model

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "dp2": (2, ParallelConfig()),
    "tp2pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
}
TEXTS = [("3+5=", "8"), ("12+34=", "46"), ("1+1=", "0123456789"), ("7=", ""), ("0+9=", "=+=")]
MICRO_BATCHES = [[2, 0], [1, 3, 4]]


def samples(policy: Any) -> dict[int, Sample]:
    """Each answer ends with the policy's end token."""
    found = {}
    for i, (prompt, answer) in enumerate(TEXTS):
        response = np.array([*policy(answer)["input_ids"], policy.eos_token_id])
        found[i] = Sample(
            uid=f"0-{i}/0",
            group=f"0-{i}",
            prompt_ids=np.array(policy(prompt)["input_ids"]),
            response_ids=response,
            rollout_logprobs=np.zeros(len(response), np.float32),
            loss_mask=np.ones(len(response), np.bool_),
            weight_versions=np.zeros(len(response), np.int64),
            score=0.0,
            finish_reason="stop",
            data_source="s",
            prompt_content=[{"role": "user", "content": prompt}],
        )
    return found


def worker(folder: Path, parallel: ParallelConfig, applies: bool) -> TrainerWorker:
    made = TrainerWorker()
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    made.config = config.build(
        {
            "model": {"path": str(folder / "policy"), "precision": "fp32"},
            "data": {"create": {}},
            "cluster": {"gpus_per_node": dist.get_world_size()},
            "reward_model": {
                "path": str(folder / "model"),
                "apply_chat_template": applies,
                "max_length": 64,
                "parallel": {**sizes, "sequence": parallel.sequence},
            },
        }
    )
    made.rank, made.num_ranks = dist.get_rank(), dist.get_world_size()
    made.engines, made.grids, made.layouts, made.store = {}, {}, {}, StepStore()
    return made


def scores(folder: Path, parallel: ParallelConfig, applies: bool) -> tuple[int, list[int], dict[int, float]]:
    """A rank's data-parallel rank, the lengths of its texts and their scores."""
    made = worker(folder, parallel, applies)
    made.build_role("reward_model", str(folder / "model"))
    data = RankGrid(made.num_ranks, parallel).coordinates(made.rank).data
    batches = MICRO_BATCHES[data::2] if parallel.data_parallel(made.num_ranks) == 2 else MICRO_BATCHES
    made.store.samples = samples(AutoTokenizer.from_pretrained(folder / "policy"))
    read = made.retokenise(range(len(TEXTS)))
    assert read.num_truncated == 0
    return data, list(read.lengths), made.score([*batches, []])


def expected(folder: Path, applies: bool) -> tuple[list[int], list[float]]:
    """transformers, one text at a time, a pad token behind each."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [f"u<{prompt}>a<{answer}>" if applies else prompt + answer for prompt, answer in TEXTS]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        found = [float(model(input_ids=torch.tensor([[*own, tokenizer.pad_token_id]])).logits[0, 0]) for own in ids]
    return [len(own) for own in ids], found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path / "policy", "0123456789+=")
    (tmp_path / "policy" / "config.json").write_text("{}")
    return tmp_path


def agree(folder: Path, layout: str, applies: bool = True) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    lengths, wanted = expected(folder, applies)
    results = run(scores, num_ranks, folder, parallel, applies)
    assert np.std(wanted) > 0.1
    for data, found_lengths, found in results:
        own = MICRO_BATCHES[data::2] if layout == "dp2" else MICRO_BATCHES
        assert found_lengths == lengths
        assert sorted(found) == sorted(i for indices in own for i in indices)
        for i, score in found.items():
            assert score == pytest.approx(wanted[i], abs=2e-5), (i, data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_transformers_in_every_layout(layout: str, folder: Path) -> None:
    write_reward_model(folder / "model")
    agree(folder, layout)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_families_score_alike(kind: str, folder: Path) -> None:
    write_reward_model(folder / "model", kind)
    agree(folder, "tp2")


def test_a_tied_embedding_and_plain_text_score_alike(folder: Path) -> None:
    write_reward_model(folder / "model", tie_word_embeddings=True)
    agree(folder, "pp2", applies=False)


def the_model_does_not_train(folder: Path) -> None:
    made = worker(folder, ParallelConfig(), True)
    made.build_role("reward_model", str(folder / "model"))
    engine = made.engines["reward_model"]
    assert not any(p.requires_grad for chunk in engine.chunks for p in chunk.parameters())
    with pytest.raises(ValueError, match="the reward_model was built without an optimizer"):
        engine.train_step([], None, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the reward_model does not train; give it no optimizer"):
        type(engine)("reward_model", engine.hf_config, ParallelConfig(), optimizer=made.config.actor.optimizer)


def test_the_model_does_not_train(folder: Path) -> None:
    write_reward_model(folder / "model")
    run(the_model_does_not_train, 1, folder)


def loading_fails(folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        worker(folder, ParallelConfig(), True).build_role("reward_model", str(folder / "model"))


@pytest.mark.parametrize(
    ("num_labels", "said"),
    [(2, r"score.weight is \[2, 32\], the model needs \[1, 32\]"), (0, "score.weight .*missing")],
)
def test_a_head_that_gives_no_one_score_is_refused(num_labels: int, said: str, folder: Path) -> None:
    """Unlike a critic, which starts with a head of zeros where there is none."""
    write_reward_model(folder / "model", num_labels=max(num_labels, 1))
    if not num_labels:
        file = folder / "model" / "model.safetensors"
        save_file({k: v for k, v in load_file(file).items() if k != "score.weight"}, file, metadata={"format": "pt"})
    run(loading_fails, 1, folder, said)
