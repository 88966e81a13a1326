"""`megarl plan`: the arithmetic from prompts to micro-batches, and where every rank stands, by hand."""

from __future__ import annotations

from typing import Any

from megarl import config
from megarl.ops.plan import describe


def plan(**sections: Any) -> str:
    return describe(config.build({"model": {"create": {}}, "data": {"create": {}}, **sections}))


def test_a_dynamic_plan_by_hand() -> None:
    """8 GPUs, tensor 2: 4 data-parallel ranks. 64 prompts x 4 answers x 768 tokens = 196,608 tokens over 4 x 16,384."""
    text = plan(
        cluster={"num_nodes": 2, "gpus_per_node": 4},
        actor={"parallel": {"tensor": 2}, "batch": {"epochs": 2}},
        algorithm={"advantage": "grpo"},
        rollout={"n": 4, "tensor": 2},
    )
    assert text.splitlines() == [
        "batches",
        "  256 prompts x 4 answers = 1024 samples a step, at most 768 tokens each (512 prompt + 256 response)",
        "  actor: 4 mini-batches of 64 prompts (256 samples) x 2 epochs = 8 optimizer steps a step",
        "    per data-parallel rank (4): about 64 samples, packed into micro-batches of at most 16384 tokens "
        "(about 3 at full length)",
        "",
        "rollout",
        "  sglang, 4 replicas, tensor 2; about 256 answers each, temperature 1, top_p 1",
        "",
        "ranks",
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
