"""Layouts against independent rules: what transformers saves, what Megatron-Core builds, what SGLang's loaders fill."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from simulated import CPU, UNTOUCHED, Parameters, allocate, assert_equal, distinct, receive
from tiny_models import declarations, megatron, megatron_layouts, sglang_layouts, tiny_config

from megarl.model.families import declare, declare_critic
from megarl.reshard.executor import Executor
from megarl.reshard.layout import Layout, Piece, Rect, Shard, check_cover
from megarl.reshard.layouts import hf_files_layout, hf_layout, sglang_layout
from megarl.reshard.plan import plan

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"]


def fill(target: Layout, values: Parameters, declaration: Any) -> list[Parameters]:
    """Every target rank's parameters, filled from whole tensors by a plan that one process executes."""
    parameters = allocate(target, torch.float32)
    filling = plan(hf_layout(declaration), target, 4, bucket_bytes=2048)
    receive(Executor(filling, torch.float32, 0, [0] * target.num_ranks, CPU), values, parameters)
    return parameters


# ------------------------------------------------------------------------------------------------ Hugging Face


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 4}], ids=["head_dim of hidden", "own head_dim"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hf_tensors_are_those_that_transformers_saves(family: str, changes: dict, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(family, tied, **changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(os.path.join(tmp_path, "model.safetensors"), "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    layout = hf_layout(declare(config))
    assert dict(layout.tensors) == saved
    assert dict(layout.shard(0).parameters) == saved
    check_cover(layout)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_critic_is_what_transformers_saves_for_sequence_classification(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, tied=True, num_labels=1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with safe_open(os.path.join(tmp_path, "model.safetensors"), "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert declare_critic(config).tensors() == saved


def test_files_hold_every_tensor_once_in_about_equal_parts() -> None:
    declaration = declare(tiny_config(num_hidden_layers=4))
    sizes = {name: math.prod(shape) for name, shape in declaration.tensors().items()}
    for count in (1, 2, 3, 5):
        layout = hf_files_layout(declaration, count)
        names = [name for rank in range(layout.num_ranks) for name in layout.shard(rank).parameters]
        assert names == list(declaration.tensors())
        assert layout.num_ranks == count
        biggest = max(sum(sizes[n] for n in layout.shard(r).parameters) for r in range(count))
        assert biggest <= sum(sizes.values()) / count + max(sizes.values())


def test_no_file_is_empty_where_one_tensor_is_larger_than_a_files_share() -> None:
    declaration = declare(tiny_config(vocab_size=4096, num_hidden_layers=1, tied=True))
    layout = hf_files_layout(declaration, 8)
    assert all(layout.shard(rank).parameters for rank in range(layout.num_ranks))
    check_cover(layout)


# ------------------------------------------------------------------------------------------------ Megatron-Core


def even_stages(pipeline: int, virtual: int) -> list[int]:
    """The stage of each of 4 layers."""
    return [layer // (4 // pipeline // virtual) % pipeline for layer in range(4)]


def megatron_reference(
    values: Parameters,
    config: Any,
    tied: bool,
    vocab: int,
    fused: bool,
    stage_of: Sequence[int],
    sizes: tuple[int, int, int, int],
    at: Any,
) -> Parameters:
    """One rank's parameters by the rules with which a Megatron model was loaded whose logits equal transformers'.

    stage_of: each layer's pipeline stage. sizes, at: of tensor, pipeline, expert and expert-tensor parallel."""
    (tensor, pipeline, num_runs, split), (t, p, e, s) = sizes, at
    layers, heads, groups = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(tensor, 0)[t]

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((-len(x) % vocab, x.shape[1]), UNTOUCHED)])

    def qkv(prefix: str, suffix: str) -> torch.Tensor:
        q, k, v = (values[f"{prefix}.self_attn.{n}_proj.{suffix}"] for n in "qkv")
        q, k, v = (x.view(groups, -1, *x.shape[1:]) for x in (q, k, v))
        assert q.shape[1] == heads // groups * dim
        return torch.cat([q, k, v], 1).reshape(-1, *q.shape[2:])

    result: Parameters = {}
    if p == 0:
        result["embedding.word_embeddings.weight"] = rows(padded(values["model.embed_tokens.weight"]))
    for layer in range(layers):
        if stage_of[layer] != p:
            continue
        hf, own = f"model.layers.{layer}", f"decoder.layers.{layer}."
        first, second = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if not fused:
            first, second = "input_layernorm.weight", "pre_mlp_layernorm.weight"
        result[own + first] = values[f"{hf}.input_layernorm.weight"]
        routed = config.model_type == "qwen3_moe" and layer not in config.mlp_only_layers
        if routed:  # moe_module_specs.py: fuse_pre_mlp_layernorm is False
            second = "pre_mlp_layernorm.weight"
        result[own + second] = values[f"{hf}.post_attention_layernorm.weight"]
        result[own + "self_attention.linear_qkv.weight"] = rows(qkv(hf, "weight"))
        if config.model_type == "qwen2":
            result[own + "self_attention.linear_qkv.bias"] = rows(qkv(hf, "bias"))
        if config.model_type.startswith("qwen3"):
            for name in "qk":
                result[own + f"self_attention.{name}_layernorm.weight"] = values[f"{hf}.self_attn.{name}_norm.weight"]
        result[own + "self_attention.linear_proj.weight"] = values[f"{hf}.self_attn.o_proj.weight"].chunk(tensor, 1)[t]
        if routed:
            result[own + "mlp.router.weight"] = values[f"{hf}.mlp.gate.weight"]
            count = config.num_experts // num_runs
            for local in range(count):
                expert = f"{hf}.mlp.experts.{e * count + local}"
                gate_up = [values[f"{expert}.{name}_proj.weight"].chunk(split, 0)[s] for name in ("gate", "up")]
                down = values[f"{expert}.down_proj.weight"].chunk(split, 1)[s]
                for number, weight in (("1", torch.cat(gate_up)), ("2", down)):
                    # experts.py: TEGroupedMLP has weight0, weight1, ...; SequentialMLP a module an expert
                    name = (
                        f"linear_fc{number}.weight{local}"
                        if fused
                        else f"local_experts.{local}.linear_fc{number}.weight"
                    )
                    result[f"{own}mlp.experts.{name}"] = weight
            continue
        gate_up = [rows(values[f"{hf}.mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        result[own + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
        result[own + "mlp.linear_fc2.weight"] = values[f"{hf}.mlp.down_proj.weight"].chunk(tensor, 1)[t]
    if p == pipeline - 1:
        result["decoder.final_layernorm.weight"] = values["model.norm.weight"]
        if not tied or pipeline > 1:
            output = values["model.embed_tokens.weight" if tied else "lm_head.weight"]
            result["output_layer.weight"] = rows(padded(output))
    return result


@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual", "context", "data"),
    [
        (t, p, v, c, d)
        for t in (1, 2, 4)
        for p, v in ((1, 1), (2, 1), (2, 2))
        for c, d in ((1, 1), (2, 1), (1, 2), (2, 2))
    ],
)
def test_megatron_parameters_are_those_of_the_reference(
    tensor: int, pipeline: int, virtual: int, context: int, data: int
) -> None:
    vocab = 8  # 37 -> 40
    for family, tied, fused, head_dim in (
        ("llama", False, True, 4),
        ("qwen2", True, False, 2),
        ("qwen3", False, False, 2),
    ):
        config = tiny_config(family, tied, head_dim=head_dim)
        declaration = declare(config)
        sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual, "context": context}
        target, _ = megatron(declaration, vocab, fused, data, **sizes)
        check_cover(target)
        values = distinct(declaration.tensors(), torch.float32)
        filled = fill(target, values, declaration)
        assert len(filled) == tensor * pipeline * context * data
        for rank, parameters in enumerate(filled):
            at = rank % tensor, rank // (tensor * context * data)
            stage_of = even_stages(pipeline, virtual)
            expected = megatron_reference(
                values, config, tied, vocab, fused, stage_of, (tensor, pipeline, 1, 1), (*at, 0, 0)
            )
            assert_equal(parameters, expected, f"rank {rank}")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("stage_of", "sizes"),
    [
        ([0, 0, 1, 1, 1], {"pipeline": 2, "first_stage_layers": 2}),
        ([0, 0, 0, 1], {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 1}),
        ([0, 1, 1, 2, 2, 3, 3], {"pipeline": 4, "first_stage_layers": 1}),
        ([0, 1, 1, 2, 2, 3], {"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1}),
        (
            [0, 1, 1, 2, 0, 1, 1, 2],
            {"pipeline": 3, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2},
        ),
        ([0, 0, 1, 0, 0, 1], {"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 2}),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, list) else "",
)
def test_uneven_stages_are_those_of_the_reference(
    stage_of: list[int], sizes: dict[str, int], tied: bool, family: str
) -> None:
    config = tiny_config(family, tied, num_hidden_layers=len(stage_of))
    declaration = declare(config)
    target, _ = megatron(declaration, 8, True, tensor=2, **sizes)
    check_cover(target)
    values = distinct(declaration.tensors(), torch.float32)
    for rank, parameters in enumerate(fill(target, values, declaration)):
        at, split = (rank % 2, rank // 2, 0, 0), (2, sizes["pipeline"], 1, 1)
        expected = megatron_reference(values, config, tied, 8, True, stage_of, split, at)
        assert_equal(parameters, expected, f"rank {rank}")


@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual", "expert", "split", "ranks"),
    [
        (1, 1, 1, 2, 1, 2),
        (1, 1, 1, 4, 1, 4),
        (1, 1, 1, 1, 2, 2),
        (2, 1, 1, 2, 1, 4),
        (2, 1, 1, 1, 1, 2),
        (2, 1, 1, 2, 2, 4),
        (2, 1, 1, 2, 2, 8),
        (4, 1, 1, 2, 1, 8),
        (2, 2, 2, 2, 1, 8),
        (1, 2, 1, 2, 2, 8),
    ],
)
@pytest.mark.parametrize("fused", [False, True], ids=["sequential", "grouped"])
def test_experts_are_those_of_the_reference(
    fused: bool, tensor: int, pipeline: int, virtual: int, expert: int, split: int, ranks: int
) -> None:
    config = tiny_config("qwen3_moe", mlp_only_layers=[1])
    declaration = declare(config)
    sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual, "expert": expert}
    data = ranks // tensor // pipeline
    target, _ = megatron(declaration, 8, fused, data, expert_tensor=split, **sizes)
    check_cover(target)
    values = distinct(declaration.tensors(), torch.float32)
    filled = fill(target, values, declaration)
    assert len(filled) == ranks
    for rank, parameters in enumerate(filled):
        # Megatron's order: tp-cp-ep-dp-pp for the dense part, etp-ep-edp-pp for the experts
        at = rank % tensor, rank // (ranks // pipeline), rank // split % expert, rank % split
        stage_of = even_stages(pipeline, virtual)
        expected = megatron_reference(values, config, False, 8, fused, stage_of, (tensor, pipeline, expert, split), at)
        assert_equal(parameters, expected, f"rank {rank}")


def test_padding_rows_of_the_vocabulary_are_never_written() -> None:
    declaration = declare(tiny_config())
    target, _ = megatron(declaration, vocab=64, tensor=4)  # 37 rows over 4 ranks of 16: 16, 16, 5, 0
    values = distinct(declaration.tensors(), torch.float32)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        shards = [parameters[name] for parameters in fill(target, values, declaration)]
        assert [int((shard != UNTOUCHED).all(1).sum()) for shard in shards] == [16, 16, 5, 0]
        assert [int((shard == UNTOUCHED).all(1).sum()) for shard in shards] == [0, 0, 11, 16]


def test_replicas_over_data_and_context_share_a_shard() -> None:
    layout, grid = megatron(declare(tiny_config()), tensor=2, pipeline=2, context=2, data=2)
    assert len(layout.shards) == 4
    for rank in range(grid.num_ranks):
        here = grid.coordinates(rank)
        same = grid.rank_of(tensor=here.tensor, pipeline=here.pipeline)
        assert layout.shard(rank) is layout.shard(same)


# ------------------------------------------------------------------------------------------------ SGLang


def sglang_reference(
    values: Parameters,
    config: Any,
    tied: bool,
    size: int,
    rank: int,
    expert_size: int = 1,
    data_parallel: int = 1,
    dp_head: bool = False,
) -> Parameters:
    """One rank's parameters by the rules of SGLang 0.5.21's loaders (sglang/srt/layers)."""
    heads, total_kv_heads = config.num_attention_heads, config.num_key_value_heads
    # runtime_context.py:73-94: attn_tp_size = tp_size // dp_size, attn_tp_rank = tp_rank % attn_tp_size
    full, attention = (size, rank), (size // data_parallel, rank % (size // data_parallel))
    # models/qwen3.py:131, models/qwen3_moe.py:547: tp_size=attn_tp_size, tp_rank=attn_tp_rank
    # linear.py:1016, QKVParallelLinear.__init__: where tp_size >= total_num_kv_heads, one key/value head a rank
    attn = attention[0]
    kv_heads, replicas = (1, attn // total_kv_heads) if attn >= total_kv_heads else (total_kv_heads // attn, 1)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def qkv(prefix: str, suffix: str) -> torch.Tensor:
        size, rank = attention
        q, k, v = (values[f"{prefix}.{n}_proj.{suffix}"] for n in "qkv")
        parameter = torch.full((heads // size * dim + 2 * kv_heads * dim, *q.shape[1:]), UNTOUCHED)
        # linear.py:1323-1331, weight_loader: offsets of q, k and v in the parameter, and their sizes
        offsets = {"q": 0, "k": heads // size * dim, "v": (heads // size + kv_heads) * dim}
        for name, loaded in (("q", q), ("k", k), ("v", v)):
            shard_size = (heads // size if name == "q" else kv_heads) * dim
            # linear.py:1368-1372: shard_id = kv_tp_rank // num_kv_head_replicas, start_idx = shard_id * shard_size
            start = (rank if name == "q" else rank // replicas) * shard_size
            parameter.narrow(0, offsets[name], shard_size).copy_(loaded.narrow(0, start, shard_size))
        return parameter

    def gate_up(prefix: str) -> torch.Tensor:
        size, rank = full
        shard_size = config.intermediate_size // size
        parameter = torch.full((2 * shard_size, config.hidden_size), UNTOUCHED)
        for index, name in enumerate(("gate", "up")):
            # linear.py:685 and 713, MergedColumnParallelLinear.weight_loader: sum(output_sizes[:id]) // tp_size
            loaded = values[f"{prefix}.{name}_proj.weight"].narrow(0, rank * shard_size, shard_size)
            parameter.narrow(0, index * shard_size, shard_size).copy_(loaded)
        return parameter

    def row_parallel(loaded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        shard_size = loaded.shape[1] // size  # linear.py:1544, RowParallelLinear.weight_loader: input_dim is 1
        return loaded.narrow(1, rank * shard_size, shard_size)

    def vocabulary(loaded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        # vocab_parallel_embedding.py:47 and 56: padded to a multiple of 64; 363 and 372: an equal range a rank, cut off
        # at the real vocabulary. (Line 509 fills the rest with zeros when SGLang itself loads; a plan leaves it alone.)
        partition = -(-len(loaded) // 64) * 64 // size
        start, stop = (min(rank_ * partition, len(loaded)) for rank_ in (rank, rank + 1))
        parameter = torch.full((partition, loaded.shape[1]), UNTOUCHED)
        parameter[: stop - start] = loaded[start:stop]
        return parameter

    def experts(prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        # runtime_context.py:135: moe_tp_rank = tp_rank % moe_tp_size, and the run of them is the expert rank
        size, rank = full
        moe_tp_size = size // expert_size
        ep_rank, tp_rank = rank // moe_tp_size, rank % moe_tp_size
        count, part = config.num_experts // expert_size, config.moe_intermediate_size // moe_tp_size
        w13 = torch.full((count, 2 * part, config.hidden_size), UNTOUCHED)
        w2 = torch.full((count, config.hidden_size, part), UNTOUCHED)
        for local in range(count):
            gate, up, down = (
                values[f"{prefix}.{ep_rank * count + local}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            # fused_moe_triton/layer.py, _load_w13: w1 (gate) in the first half, w3 (up) in the second; _load_w2
            w13[local].narrow(0, 0, part).copy_(gate.narrow(0, tp_rank * part, part))
            w13[local].narrow(0, part, part).copy_(up.narrow(0, tp_rank * part, part))
            w2[local].copy_(down.narrow(1, tp_rank * part, part))
        return w13, w2

    # models/qwen2.py:338, models/qwen2_moe.py:1126: use_attn_tp_group=is_dp_attention_enabled()
    result = {"model.embed_tokens.weight": vocabulary(values["model.embed_tokens.weight"], *attention)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            result[f"{prefix}.{norm}"] = values[f"{prefix}.{norm}"]
        # models/llama.py:543-547: stacked_params_mapping gives the names
        result[f"{prefix}.self_attn.qkv_proj.weight"] = qkv(f"{prefix}.self_attn", "weight")
        if config.model_type == "qwen2":
            result[f"{prefix}.self_attn.qkv_proj.bias"] = qkv(f"{prefix}.self_attn", "bias")
        if config.model_type.startswith("qwen3"):  # models/qwen3.py:121, RMSNorm(head_dim): the same on all ranks
            for name in ("q_norm", "k_norm"):
                result[f"{prefix}.self_attn.{name}.weight"] = values[f"{prefix}.self_attn.{name}.weight"]
        result[f"{prefix}.self_attn.o_proj.weight"] = row_parallel(
            values[f"{prefix}.self_attn.o_proj.weight"], *attention
        )
        # models/qwen3_moe.py:845: all layers have experts
        if config.model_type == "qwen3_moe":
            result[f"{prefix}.mlp.gate.weight"] = values[f"{prefix}.mlp.gate.weight"]
            w13, w2 = experts(f"{prefix}.mlp.experts")
            result[f"{prefix}.mlp.experts.w13_weight"], result[f"{prefix}.mlp.experts.w2_weight"] = w13, w2
            continue
        result[f"{prefix}.mlp.gate_up_proj.weight"] = gate_up(f"{prefix}.mlp")
        result[f"{prefix}.mlp.down_proj.weight"] = row_parallel(values[f"{prefix}.mlp.down_proj.weight"], *full)
    result["model.norm.weight"] = values["model.norm.weight"]
    if not tied:  # models/llama.py:529: tied, lm_head is embed_tokens itself
        # models/qwen3.py:531, models/qwen3_moe.py:1021: use_attn_tp_group=enable_dp_lm_head
        result["lm_head.weight"] = vocabulary(values["lm_head.weight"], *(attention if dp_head else full))
    return result


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sglang_parameters_are_those_of_its_loaders(family: str, tied: bool, kv_heads: int, size: int) -> None:
    config = tiny_config(family, tied, num_key_value_heads=kv_heads, head_dim=2, vocab_size=70, num_hidden_layers=1)
    declaration = declare(config)
    target = sglang_layout(declaration, size, num_replicas=2, vocab_multiple=64)
    values = distinct(declaration.tensors(), torch.float32)
    for rank, parameters in enumerate(fill(target, values, declaration)):
        assert_equal(parameters, sglang_reference(values, config, tied, size, rank % size), f"rank {rank}")
    assert target.replica_of == tuple([0] * size + [1] * size)
    check_cover(target, range(size))


@pytest.mark.parametrize(("size", "expert_size"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_sglang_experts_are_those_of_its_loaders(size: int, expert_size: int) -> None:
    config = tiny_config("qwen3_moe", num_hidden_layers=2)
    declaration = declare(config)
    target = sglang_layout(declaration, size, num_replicas=1, vocab_multiple=64, expert=expert_size)
    values = distinct(declaration.tensors(), torch.float32)
    for rank, parameters in enumerate(fill(target, values, declaration)):
        assert_equal(parameters, sglang_reference(values, config, False, size, rank, expert_size), f"rank {rank}")
    check_cover(target)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dp_head", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("size", "copies"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_sglang_attention_is_copied_over_data_parallel_groups(
    family: str, tied: bool, dp_head: bool, kv_heads: int, size: int, copies: int
) -> None:
    vocab_size = 128 if dp_head and copies < size else 70
    sizes = {"num_key_value_heads": kv_heads, "head_dim": 2, "vocab_size": vocab_size, "num_hidden_layers": 1}
    config = tiny_config(family, tied, **sizes)
    declaration, expert = declare(config), 2 if family == "qwen3_moe" else 1
    target = sglang_layout(declaration, size, 2, 64, expert, copies, dp_head)
    values = distinct(declaration.tensors(), torch.float32)
    for rank, parameters in enumerate(fill(target, values, declaration)):
        expected = sglang_reference(values, config, tied, size, rank % size, expert, copies, dp_head)
        assert_equal(parameters, expected, f"rank {rank}")
    check_cover(target, range(size))


def test_sglang_splits_attention_over_a_group_only() -> None:
    """8 heads of 4 channels over groups of 2 ranks: 4 query, 2 key and 2 value heads a rank; the feed-forward size 24
    and the vocabulary of 64 over all 4 ranks, the embedding over 2."""
    target = sglang_layout(declare(tiny_config("qwen3", head_dim=4)), 4, 1, 64, data_parallel=2)
    for rank in range(4):
        shapes = target.shard(rank).parameters
        assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == ((4 + 2 + 2) * 4, 16)
        assert shapes["model.layers.0.self_attn.o_proj.weight"] == (16, 16)
        assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (2 * 6, 16)
        assert shapes["model.embed_tokens.weight"] == (32, 16)
        assert shapes["lm_head.weight"] == (16, 16)


def test_sglang_data_parallel_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="sglang data-parallel size 3 does not divide its tensor size 4"):
        sglang_layout(declare(tiny_config("qwen3")), 4, 1, 64, data_parallel=3)
    three = declare(tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=3))
    with pytest.raises(ValueError, match="sglang tensor / data-parallel size 2 does not divide the model's 3 key"):
        sglang_layout(three, 4, 1, 64, data_parallel=2)
    sglang_layout(three, 2, 1, 64, data_parallel=2)


def test_a_data_parallel_head_of_several_ranks_needs_a_vocabulary_without_padding() -> None:
    padded, whole = (declare(tiny_config("qwen3", vocab_size=size)) for size in (70, 128))
    with pytest.raises(ValueError, match="groups of 2 ranks needs a vocabulary that is a multiple of 64, .* is 70"):
        sglang_layout(padded, 4, 1, 64, data_parallel=2, data_parallel_head=True)
    for declaration, copies in ((padded, 4), (whole, 2)):
        sglang_layout(declaration, 4, 1, 64, data_parallel=copies, data_parallel_head=True)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_sglang_families_without_data_parallel_attention_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="splits the attention of this model's family over all ranks"):
        sglang_layout(declare(tiny_config(family)), 4, 1, 64, data_parallel=2)


def test_sglang_has_no_layers_without_experts_between_those_that_have_them() -> None:
    with pytest.raises(ValueError, match="some layers of the model have experts and some have none"):
        sglang_layout(declare(tiny_config("qwen3_moe", mlp_only_layers=[1])), 1, 1, 64)


def test_sglang_expert_sizes_that_do_not_divide_are_named() -> None:
    declaration = declare(tiny_config("qwen3_moe"))
    with pytest.raises(ValueError, match="sglang expert size 3 does not divide its tensor size 4"):
        sglang_layout(declaration, 4, 1, 64, expert=3)
    with pytest.raises(ValueError, match="sglang expert size 8 does not divide the model's 4 experts"):
        sglang_layout(declaration, 8, 1, 64, expert=8)


# ------------------------------------------------------------------------------------------------ all


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_lie_inside_their_parameters_and_cover_the_model(data: st.DataObject) -> None:
    declaration = data.draw(declarations())
    for strategy in (megatron_layouts, sglang_layouts):
        layout = data.draw(strategy(declaration))
        check_cover(layout)
        for shard in layout.shards:
            used: dict[str, torch.Tensor] = {n: torch.zeros(s) for n, s in shard.parameters.items()}
            for piece in shard.pieces:
                local = piece.local
                counts = used[piece.parameter]
                matrix = counts.view(-1, counts.shape[-1] if counts.dim() > 1 else 1)
                assert local.row1 <= matrix.shape[0]
                assert local.col1 <= matrix.shape[1]
                matrix[local.row0 : local.row1, local.col0 : local.col1] += 1
            for name, count in used.items():
                is_vocabulary = "embed" in name or "output_layer" in name or "lm_head" in name
                assert count.max() <= 1, f"{name} holds two pieces at one place"
                assert is_vocabulary or count.min() == 1, f"{name} has a hole"


@given(st.tuples(*[st.integers(0, 6)] * 8))
def test_what_a_rectangle_has_more_than_another(numbers: tuple[int, ...]) -> None:
    def rect(row0: int, row1: int, col0: int, col1: int) -> Rect:
        return Rect(*sorted((row0, row1)), *sorted((col0, col1)))

    one, other = rect(*numbers[:4]), rect(*numbers[4:])
    found = torch.zeros(6, 6)
    for part in one.minus(other):
        assert part.size
        found[part.row0 : part.row1, part.col0 : part.col1] += 1
    expected = torch.zeros(6, 6)
    expected[one.row0 : one.row1, one.col0 : one.col1] = 1
    expected[other.row0 : other.row1, other.col0 : other.col1] = 0
    assert torch.equal(found, expected)


def test_check_cover_names_a_tensor_that_is_not_whole() -> None:
    shard = Shard({"w": (2, 2)}, (Piece("w", Rect(0, 1, 0, 2), "w", 0, 0),))
    with pytest.raises(ValueError, match=r"half: w has 4 elements, its pieces hold 2"):
        check_cover(Layout("half", {"w": (2, 2)}, (shard,), (0,)))


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 attention heads"),
        ({"num_key_value_heads": 2}, 4, "2 key/value heads"),
        ({"intermediate_size": 22}, 4, "22 feed-forward size"),
        ({}, 3, "8 attention heads"),
    ],
)
def test_a_tensor_size_that_does_not_divide_is_named(changes: dict, tensor: int, message: str) -> None:
    declaration = declare(tiny_config(**changes))
    with pytest.raises(ValueError, match=f"megatron tensor size {tensor} does not divide the model's {message}"):
        megatron(declaration, tensor=tensor, vocab=tensor)


def test_a_vocabulary_that_does_not_divide_after_padding_is_named() -> None:
    declaration = declare(tiny_config())
    with pytest.raises(ValueError, match="tensor size 4 does not divide the model's 38 rows of the padded vocabulary"):
        megatron(declaration, tensor=4, vocab=2)


def test_sglang_repeats_heads_only_where_the_ranks_are_a_multiple_of_them() -> None:
    declaration = declare(tiny_config(hidden_size=24, num_attention_heads=12, num_key_value_heads=3))
    with pytest.raises(ValueError, match="sglang tensor size 4 does not divide the model's 3 key/value heads"):
        sglang_layout(declaration, 4, 1, 64)


def test_layers_that_do_not_divide_over_the_stages_are_an_error() -> None:
    with pytest.raises(ValueError, match="4 layers do not divide"):
        megatron(declare(tiny_config()), pipeline=3)
