"""For every family: what a sync by plan leaves in the real SGLang are the bytes that SGLang's own loading leaves."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megarl.compat import sglang_cpu
from megarl.config import ParallelConfig
from megarl.engines import sglang
from megarl.model.families import declare
from megarl.reshard.checksum import matrix
from megarl.reshard.layouts import hf_layout
from megarl.reshard.plan import plan
from megarl.workers.weights import compare_parameters
from tests.e2e import parameter_loaders, sglang_data_parallel
from tests.e2e.sglang_replica import (
    SIZES,
    TENSOR_PIPELINE,
    VOCAB,
    Trainers,
    assert_greedy_as,
    make_requests,
    running_engine,
    save_model,
    target_layout,
)
from tests.processes import parties

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

PADDED_VOCAB = 128
"""SGLang's rows for the 99 tokens; a Megatron layout of tensor size 2 has 256."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Hashes:
    """SHA-256 of a parameter's or buffer's bytes; those of a vocabulary's padding rows apart."""

    is_parameter: bool
    dtype: str
    shape: list[int]
    filled: str
    padding: str


MOE = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
# Of sizes that SGLang does not pad for 4 ranks on the CPU.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}
WIDE_MOE = {"moe_intermediate_size": 128, "vocab_size": PADDED_VOCAB}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=32),
    "qwen3-untied": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
    "qwen3-wide": Qwen3Config(**SIZES | WIDE, tie_word_embeddings=True, head_dim=32),
    "qwen3_moe-wide": Qwen3MoeConfig(**SIZES | WIDE | MOE | WIDE_MOE, tie_word_embeddings=False),
}
EXPERT = ParallelConfig(tensor=2, pipeline=2, expert=2)


@pytest.fixture(autouse=True)
def loaders(monkeypatch):
    for loader in (parameter_loaders.hash_parameters, parameter_loaders.spoil_parameters):
        monkeypatch.setitem(sglang.LOADERS, loader.__name__, f"{loader.__module__}.{loader.__name__}")


def hashes(engine, filled):
    """Per rank, {name: Hashes} of all of SGLang's parameters and buffers; filled: see `filled_rows`."""
    envelope = lambda reply, rank: json.dumps({"reply": reply, "filled": filled[rank]})  # noqa: E731
    replies = engine._run_loader("hash_parameters", envelope)
    return [{name: Hashes(*values) for name, values in reply.items()} for reply in replies]


def differing(some, others):
    """By rank, the names of what is not the same in both."""
    return [
        {n for n in one.keys() | other.keys() if one.get(n) != other.get(n)}
        for one, other in zip(some, others, strict=True)
    ]


def filled_rows(vocab, tensor, data_parallel=1, data_parallel_head=False):
    """Per rank, how many of its rows of a vocabulary are tokens: filled_rows(99, 2) is 64 and 35 of 64 rows each."""
    of_attention = tensor // data_parallel

    def rows(rank, size):
        return min(max(vocab - rank % size * (PADDED_VOCAB // size), 0), PADDED_VOCAB // size)

    head = of_attention if data_parallel_head else tensor
    return [{EMBEDDING: rows(rank, of_attention), HEAD: rows(rank, head)} for rank in range(tensor)]


def spoil(engine):
    engine._run_loader("spoil_parameters", lambda reply, _: json.dumps({"reply": reply}))


def assert_answers_of(model, engine):
    requests = make_requests(temperature=0.0)
    assert_greedy_as(model, requests, engine.generate(requests))


@pytest.mark.parametrize(
    ("family", "tensor", "expert", "parallel"),
    [
        ("llama", 1, 1, TENSOR_PIPELINE),
        ("mistral", 1, 1, TENSOR_PIPELINE),
        ("qwen2-tied", 1, 1, TENSOR_PIPELINE),
        ("qwen2", 2, 1, TENSOR_PIPELINE),
        ("qwen3", 1, 1, TENSOR_PIPELINE),
        ("qwen3_moe", 1, 1, EXPERT),
        pytest.param("qwen3_moe", 2, 1, EXPERT, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 2, EXPERT, marks=pytest.mark.slow),
    ],
)
def test_a_sync_leaves_the_bytes_of_sglangs_own_loading(family, tensor, expert, parallel, tmp_path):
    """Of every parameter of every tensor-parallel rank; buffers stay as they were. Without a GPU SGLang cannot answer
    with experts spread over its ranks (0.5.21)."""
    assert_answers = assert_answers_of if expert == 1 else lambda model, engine: None
    padding = [*[set()] * (tensor - 1), {EMBEDDING, HEAD}]  # the last rank has it
    assert_syncs_as_loading(
        CONFIGS[family], tensor, parallel, tmp_path, filled_rows(VOCAB, tensor), padding, assert_answers, expert=expert
    )


@pytest.mark.parametrize(
    ("family", "tensor", "copies", "head", "parallel", "padding"),
    [
        ("qwen3", 2, 2, False, TENSOR_PIPELINE, [{EMBEDDING}] * 2),
        pytest.param("qwen3-wide", 4, 2, False, TENSOR_PIPELINE, [set(), {EMBEDDING}] * 2, marks=pytest.mark.slow),
        pytest.param("qwen3-untied", 2, 2, True, TENSOR_PIPELINE, [{EMBEDDING, HEAD}] * 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 2, False, EXPERT, [{EMBEDDING}, {EMBEDDING, HEAD}], marks=pytest.mark.slow),
        pytest.param("qwen3_moe-wide", 4, 2, True, EXPERT, [set()] * 4, marks=pytest.mark.slow),
    ],
)
def test_a_sync_leaves_the_bytes_of_sglangs_own_loading_in_each_copy_of_the_attention(
    family, tensor, copies, head, parallel, padding, tmp_path, monkeypatch
):
    """Data-parallel attention. padding: by rank, what has rows of the vocabulary without a token. Without a GPU SGLang
    cannot answer with an output layer that groups of several ranks hold (0.5.21): gloo wants another shape."""
    assert_answers = (lambda model, engine: None) if head and copies < tensor else assert_answers_of
    sglang_data_parallel.install(monkeypatch)
    sizes = {"data_parallel": copies, "data_parallel_head": head}
    config = CONFIGS[family]
    filled = filled_rows(config.vocab_size, tensor, **sizes)
    assert_syncs_as_loading(config, tensor, parallel, tmp_path, filled, padding, assert_answers, **sizes)


def assert_syncs_as_loading(config, tensor, parallel, tmp_path, filled, padding, assert_answers, **sizes):
    """sizes: of SGLang, beside tensor."""
    model, other_model = (save_model(config, seed, tmp_path / name) for seed, name in enumerate(("model", "other")))
    trainers = Trainers(config, tmp_path, tensor, parallel=parallel, **sizes)
    with (
        parties(*trainers.parties),
        running_engine(tmp_path / "model", tensor, tmp_path / "sglang.log", **sizes) as engine,
    ):
        own = hashes(engine, filled)
        nothing = [set()] * tensor
        shapes = [{n: list(s) for n, s in trainers.target.shard(rank).parameters.items()} for rank in range(tensor)]
        assert [{n: found.shape for n, found in rank.items() if found.is_parameter} for rank in own] == shapes
        names = [set(rank) for rank in shapes]
        assert_answers(model, engine)

        trainers.load_into(engine, str(tmp_path / "other"), 1)
        assert differing(own, hashes(engine, filled)) == names
        assert_answers(other_model, engine)

        trainers.load_into(engine, str(tmp_path / "model"), 2)
        assert differing(own, hashes(engine, filled)) == nothing
        assert_answers(model, engine)

        # From parameters that hold nothing but NaNs: every byte comes from the trainers, except the padding of the
        # vocabulary, which SGLang fills with zeros when it loads and no plan writes; no answer depends on it.
        spoil(engine)
        spoilt = hashes(engine, filled)
        trainers.load_into(engine, str(tmp_path / "model"), 3)
        expected = [
            {n: dataclasses.replace(found, padding=spoilt_rank[n].padding) for n, found in rank.items()}
            for rank, spoilt_rank in zip(own, spoilt, strict=True)
        ]
        assert differing(expected, hashes(engine, filled)) == nothing
        assert differing(expected, own) == [found & held for found, held in zip(padding, names, strict=True)]
        assert_answers(model, engine)


@pytest.mark.parametrize(("kv_heads", "tensor"), [(1, 2), (2, 4), (4, 2)])
def test_key_value_heads_lie_where_sglangs_own_layer_puts_them(kv_heads, tensor):
    """Repeated where there are more ranks than heads: the engine does so on GPUs, on the CPU it pads them (below)."""
    sglang_cpu.install()
    from sglang.srt.layers.linear import QKVParallelLinear

    config = copy.deepcopy(CONFIGS["qwen2"])
    config.num_key_value_heads = kv_heads
    whole = {name: torch.randn(shape) for name, shape in declare(config).tensors().items()}
    target = target_layout(config, tensor)
    parameters = [
        {n: torch.full(shape, torch.nan) for n, shape in target.shard(r).parameters.items()} for r in range(tensor)
    ]
    for copied in plan(hf_layout(declare(config)), target, 4).copies:
        into, of = matrix(parameters[copied.target_rank][copied.target_parameter]), matrix(whole[copied.tensor])
        into[rows_columns(copied.target)] = of[rows_columns(copied.source)]
    for rank in range(tensor):
        layer = QKVParallelLinear(64, 16, 4, kv_heads, tp_rank=rank, tp_size=tensor, params_dtype=torch.float32)
        for kind, parameter in layer.named_parameters():
            for part in "qkv":
                layer.weight_loader(parameter, whole[f"model.layers.1.self_attn.{part}_proj.{kind}"], part)
            assert torch.equal(parameters[rank][f"model.layers.1.self_attn.qkv_proj.{kind}"], parameter)


def rows_columns(rect):
    return slice(rect.row0, rect.row1), slice(rect.col0, rect.col1)


@pytest.mark.slow
def test_what_sglang_pads_on_the_cpu_is_refused_by_name(tmp_path):
    """For 2 ranks SGLang makes 2 key/value heads of 1, 8 query heads of 4, and a feed-forward size of 128 of 96, the
    next multiple of 32 x ranks (configs/update_config.py, adjust_config_with_unaligned_cpu_tp)."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_key_value_heads, config.intermediate_size = 1, 96
    save_model(config, 0, tmp_path / "model")
    with running_engine(tmp_path / "model", 2, tmp_path / "sglang.log", load_weights=False) as engine:
        found = engine.parameter_shapes()
    padded = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    named = r"model.layers.0.mlp.down_proj.weight is \(64, 64\) in the engine, \(64, 48\) in the plan"
    for rank, described in enumerate(found):
        actual = {name: info.shape for name, info in described.items()}
        planned = dict(target_layout(config, 2).shard(rank).parameters)
        wrong = {name for name in actual if actual[name] != planned[name]}
        assert wrong == {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in padded}
        with pytest.raises(ValueError, match=named):
            compare_parameters(planned, actual, "replica 0")
        assert actual["model.layers.0.self_attn.qkv_proj.weight"] == ((4 + 2) * 16, 64)
        assert planned["model.layers.0.self_attn.qkv_proj.weight"] == ((2 + 2) * 16, 64)
