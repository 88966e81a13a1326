"""`megarl plan`: the arithmetic from prompts to micro-batches, memory, the engine's room, what a sync moves, and where
every rank stands, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config

from megarl import cli, config
from megarl.data.tiny import write_tiny_model, write_tiny_tokenizer
from megarl.model.families import declare
from megarl.ops.plan import describe, model_configs


def plan(**sections: Any) -> str:
    return describe(config.build({"model": {"create": {}}, "data": {"create": {}}, **sections}))


def sections(text: str) -> dict[str, list[str]]:
    """The lines under each heading, by its first word."""
    return {lines[0].split()[0]: lines[1:] for lines in map(str.splitlines, text.split("\n\n"))}


def numbers(lines: list[str]) -> dict[str, list[str]]:
    """Of a table's lines, each label's numbers."""
    rows = {line.strip().rsplit("  ", 1)[0]: line.split("  ") for line in lines}
    return {cells[1]: [cell.strip() for cell in cells[2:] if cell.strip()] for cells in rows.values() if len(cells) > 2}


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_dynamic_plan_by_hand() -> None:
    """8 GPUs, tensor 2: 4 data-parallel ranks. 64 prompts x 4 answers x 768 tokens = 196,608 tokens over 4 x 16,384."""
    text = plan(
        cluster={"num_nodes": 2, "gpus_per_node": 4},
        actor={"parallel": {"tensor": 2}, "batch": {"epochs": 2}},
        algorithm={"advantage": "grpo"},
        rollout={"n": 4, "tensor": 2},
    )
    found = sections(text)
    assert list(found) == ["batches", "rollout", "memory", "SGLang", "GB", "weight", "ranks"]
    assert found["batches"] == [
        "  256 prompts x 4 answers = 1024 samples a step, at most 768 tokens each (512 prompt + 256 response)",
        "  actor: 4 mini-batches of 64 prompts (256 samples) x 2 epochs = 8 optimizer steps a step",
        "    per data-parallel rank (4): about 64 samples, packed into micro-batches of at most 16384 tokens "
        "(about 3 at full length)",
    ]
    assert found["rollout"] == [
        "  sglang, 4 replicas, tensor 2; about 256 answers each, temperature 1, top_p 1",
    ]
    assert found["ranks"] == [
        "  actor: tensor 2 x pipeline 1 x context 1 x data 4 = 8 ranks",
        "  rank  node  gpu  actor tp/pp/cp/dp     ",
        "     0     0    0  0/0/0/0               ",
        "     1     0    1  1/0/0/0               ",
        "     2     0    2  0/0/0/1               ",
        "     3     0    3  1/0/0/1               ",
        "     4     1    0  0/0/0/2               ",
        "     5     1    1  1/0/0/2               ",
        "     6     1    2  0/0/0/3               ",
        "     7     1    3  1/0/0/3               ",
    ]


def test_a_replica_is_asked_for_spare_prompts_and_greedy_answers_too() -> None:
    """256 x 1.25 = 320 prompts, each with 4 answers and a greedy one, over 4 replicas: 400."""
    text = plan(cluster={"gpus_per_node": 4}, algorithm={"advantage": "remax"}, rollout={"n": 4, "oversample": 1.25})
    assert sections(text)["rollout"] == [
        "  sglang, 4 replicas, tensor 1; about 400 answers each, temperature 1, top_p 1"
    ]


def test_static_micro_batches_and_a_role_for_each_column() -> None:
    """64 samples over 2 data-parallel ranks in micro-batches of 5: 7 each. The critic has other sizes."""
    text = plan(
        cluster={"gpus_per_node": 4},
        actor={"parallel": {"pipeline": 2}, "batch": {"dynamic": False, "micro_batch_size": 5}, "kl_loss_coef": 0.1},
        critic={"parallel": {"context": 4}},
        rollout={"engine": "hf"},
    )
    assert "    per data-parallel rank (2): about 32 samples, in micro-batches of 5 (7)" in text
    # 64 samples x 768 tokens / (16,384 x context 4) = 0.75
    assert "(1): about 64 samples, packed into micro-batches of at most 65536 tokens (about 1 at full length)" in text
    assert "  hf, 4 replicas, in the trainer's processes; about 64 answers each" in text
    table = text.splitlines()[-4:]
    assert [line.split() for line in table] == [
        ["0", "0", "0", "0/0/0/0", "0/0/0/0", "0/0/0/0"],
        ["1", "0", "1", "0/0/0/1", "0/0/1/0", "0/0/0/1"],
        ["2", "0", "2", "0/1/0/0", "0/0/2/0", "0/0/0/2"],
        ["3", "0", "3", "0/1/0/1", "0/0/3/0", "0/0/0/3"],
    ]


# ------------------------------------------------------------------------------------------------ memory and sync


def test_qwen_05b_on_one_gpu_by_hand(qwen: str) -> None:
    """494,032,768 elements, of the critic 896 more: 0.988 GB of parameters, 1.976 of gradients, 5.928 of Adam's states.
    When SGLang starts the roles have 10 bytes an element, the moments not yet: 80 GB - 9,880,664,320 are free. 0.4 of
    that less 988,065,536 of weights is 27,059,668,736, over 2 x 24 x 2 x 64 x 2 = 12,288 bytes a token 2,202,121."""
    found = sections(plan(model={"path": qwen}, rollout={"sglang": {"memory_fraction": 0.4}}))
    assert found["memory"][1:] == [
        "  actor           0        0.99       1.98       5.93     8.89  nothing",
        "  critic          0        0.99       1.98       5.93     8.89  nothing",
    ]
    room = numbers(found["SGLang"])
    assert room == {
        "free while it starts, GB": ["70.12", "131.12"],
        "its share: memory_fraction 0.4, GB": ["28.05", "52.45"],
        "weights, GB": ["0.99", "0.99"],
        "KV cache, GB": ["27.06", "51.46"],
        "tokens in it, of 12,288 bytes each": ["2,202,121", "4,187,798"],
        "answers of 768 tokens that fit": ["2,867", "5,452"],
        "of 256 a replica, run together": ["256", "256"],
    }
    # Both roles stay: 17.785. The share of 28.048 or 52.448 comes to them.
    peaks = numbers(found["GB"])
    assert peaks["the actor trains"] == peaks["the critic trains"] == ["17.79", "17.79"]
    assert peaks["answers are generated"] == ["45.83", "70.23"]
    moved = numbers(found["weight"])
    assert moved["within GPUs"] == moved["written into the engine"] == ["0.99"]
    assert moved["between nodes"] == moved["must leave a GPU at least"] == ["0.00"]


def test_what_is_offloaded_makes_room(qwen: str) -> None:
    """Nothing of the actor stays: 17.785 - 8.893 while answers are generated and the critic trains; while SGLang starts
    the critic's 4.940."""
    everything = {"parameters": True, "gradients": True, "optimizer": True}
    found = sections(plan(model={"path": qwen}, actor={"offload": everything}))
    assert found["memory"][1].endswith("8.89  parameters, gradients, optimizer")
    assert numbers(found["SGLang"])["free while it starts, GB"] == ["75.06", "136.06"]
    peaks = numbers(found["GB"])
    assert peaks["the actor trains"] == ["17.79", "17.79"]
    assert peaks["the critic trains"] == ["8.89", "8.89"]
    assert peaks["answers are generated"] == ["46.42", "76.92"]  # 8.893 + 0.5 x 75.060 or 136.060


def test_gpus_of_the_engines_own(qwen: str) -> None:
    """0.5 x 80 GB and nothing of the trainer's; the weights go to each of 2 replicas from another node, in buckets of
    at most 0.537 GB, of which two are held."""
    found = sections(plan(model={"path": qwen}, rollout={"num_gpus": 2}))
    assert numbers(found["SGLang"])["free while it starts, GB"] == ["80.00", "141.00"]
    peaks = numbers(found["GB"])
    assert "answers are generated" not in peaks
    assert peaks["the actor trains"] == ["17.79", "17.79"]
    assert 40.9 < float(peaks["the engine's own GPUs"][0]) < 41.08
    moved = numbers(found["weight"][:-1])
    assert moved["between nodes"] == moved["must leave a GPU at least"] == moved["written into the engine"] == ["1.98"]
    assert "other nodes" in found["weight"][-1]


def test_without_gpus_there_are_no_gigabytes_of_a_gpu() -> None:
    found = sections(plan(cluster={"device": "cpu"}, actor={"offload": {"optimizer": True}}))
    assert list(found) == ["batches", "rollout", "memory", "weight", "ranks"]
    assert all(line.endswith("nothing") for line in found["memory"][1:])


def test_remarks_stand_under_their_table(qwen: str) -> None:
    options = {"memory_fraction": 0.99, "cuda_graph_max_batch": 100, "options": {"schedule_policy": "lpm"}}
    found = sections(plan(model={"path": qwen}, rollout={"sglang": options}))
    assert found["SGLang"][-2:] == [
        "  (without rollout.sglang.options: schedule_policy)",
        "  ! 256 answers run together, but batches above 100 have no CUDA graph: raise "
        "rollout.sglang.cuda_graph_max_batch",
    ]
    # 17.785 + 0.99 x 70.119 = 87.2
    assert found["GB"][-2].startswith("  ! on a GPU of 80 GB 87.2 GB do not fit while answers are generated")


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("create", [{}, {"kind": "qwen2", "num_layers": 3, "tie_embeddings": True, "alphabet": "01+="}])
def test_a_model_that_the_run_makes_has_the_same_tensors(create: dict[str, Any], tmp_path: Path) -> None:
    loaded = config.build({"model": {"create": create}, "data": {"create": {}}})
    made = loaded.model.create
    assert made is not None
    write_tiny_tokenizer(tmp_path, made.alphabet)
    layers, tied = made.num_layers, made.tie_embeddings
    write_tiny_model(tmp_path, made.kind, num_layers=layers, tie_embeddings=tied)
    hf_config, _ = model_configs(loaded)
    assert declare(hf_config).tensors() == declare(AutoConfig.from_pretrained(tmp_path)).tensors()


def test_a_critic_of_another_model_has_its_own_size(qwen: str, tmp_path: Path) -> None:
    """64 x 32 of vocabulary (128 rows with padding), a layer of 2 x 32 + 4 x 32 x 32 + 3 x 64 x 32, a norm and a value
    head of 32."""
    other = tmp_path / "other"
    LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    ).save_pretrained(other)
    found = sections(plan(model={"path": qwen}, critic={"path": str(other)}))
    elements = 128 * 32 + 2 * 32 + 4 * 32 * 32 + 3 * 64 * 32 + 2 * 32
    assert found["memory"][2].split()[2] == f"{2 * elements / 1e9:.4f}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.parallel.tensor=4", "actor.parallel: megatron tensor size 4 does not divide the model's 14 attention"),
        ("rollout.tensor=4", "rollout.tensor, rollout.sglang.expert: sglang tensor size 4 does not divide"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_an_error(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {qwen}}}\ndata: {{create: {{}}}}\ncluster: {{gpus_per_node: 4}}\n")
    assert cli.main(["plan", str(file), override]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_reward_model_has_its_own_size_and_no_gradients(qwen: str, tmp_path: Path) -> None:
    """Its 64 x 32 of vocabulary are 128 rows with padding; a layer, a norm and a value head of 32: bf16, forward only,
    and offloaded while idle."""
    other = tmp_path / "other"
    LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    ).save_pretrained(other)
    (other / "tokenizer_config.json").write_text("{}")
    found = sections(
        plan(
            model={"path": qwen},
            reward_model={"path": str(other), "offload": {"parameters": True}},
            algorithm={"advantage": "grpo"},
            rollout={"n": 2},
        )
    )
    elements = 128 * 32 + 2 * 32 + 4 * 32 * 32 + 3 * 64 * 32 + 2 * 32
    role, _, parameters, gradients, optimizer, total, leaves = found["memory"][2].split()
    assert (role, leaves) == ("reward_model", "parameters")
    size = f"{2 * elements / 1e9:.4f}"
    assert (parameters, float(gradients), float(optimizer), total) == (size, 0.0, 0.0, size)
    assert any(line.strip().startswith("the reward model scores") for line in found["GB"])
