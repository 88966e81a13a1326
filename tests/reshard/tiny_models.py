"""Tiny models and random layouts for the tests of this folder."""

from __future__ import annotations

import contextlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from megarl.config import ParallelConfig
from megarl.model.families import declare
from megarl.parallel.topology import RankGrid, stage_sizes
from megarl.reshard.declaration import Declaration
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import megatron_layout, sglang_layout


def tiny_config(model_type: str = "llama", tied: bool = False, **changes: Any) -> Any:
    """A transformers config. Vocabulary 37 pads to 40 or 64."""
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "mistral": transformers.MistralConfig,
    }
    sizes: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    if model_type == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return classes[model_type](**{**sizes, **changes})


def plain_config(**sizes: Any) -> SimpleNamespace:
    """The fields that families read, without transformers: for sizes that a real model would not have."""
    return SimpleNamespace(**sizes)


def megatron(
    declaration: Declaration, vocab: int = 8, fused: bool = False, data: int = 1, **sizes: int
) -> tuple[Layout, RankGrid]:
    """As many ranks as the dense grid needs, times data."""
    parallel = ParallelConfig(**sizes)
    grid = RankGrid(parallel.model_size * data, parallel)
    return megatron_layout(declaration, grid, vocab, fused), grid


@st.composite
def declarations(draw: st.DrawFn) -> Declaration:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return declare(
        plain_config(
            model_type=draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"])),
            vocab_size=draw(st.integers(1, 40)),
            hidden_size=draw(st.integers(2, 5)),
            intermediate_size=4 * draw(st.integers(1, 3)),
            num_hidden_layers=draw(st.integers(1, 5)),
            num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4])),
            num_key_value_heads=kv_heads,
            head_dim=draw(st.integers(1, 3)),
            tie_word_embeddings=draw(st.booleans()),
            num_experts=draw(st.sampled_from([2, 4])),
            moe_intermediate_size=4 * draw(st.integers(1, 2)),
        )
    )


@st.composite
def stages(draw: st.DrawFn, num_layers: int) -> dict[str, int]:
    """Up to three pipeline stages, interleaved or not, even or not."""
    pipeline = draw(st.integers(1, min(num_layers, 3)))
    virtual = draw(st.sampled_from([v for v in (1, 2) if v == 1 or (pipeline > 1 and num_layers >= v * pipeline)]))
    sizes = {"pipeline": pipeline, "virtual_pipeline": virtual}
    outer = range(0, num_layers, virtual) if pipeline > 1 else range(1)
    splits = []
    for first, last in itertools.product(outer, repeat=2):
        split = {**sizes, "first_stage_layers": first, "last_stage_layers": last}
        with contextlib.suppress(ValueError):
            stage_sizes(num_layers, ParallelConfig(**split))
            splits.append(split)
    return draw(st.sampled_from(splits)) if splits else {}


@st.composite
def megatron_layouts(draw: st.DrawFn, declaration: Declaration) -> Layout:
    """At most 16 ranks."""
    tensor = draw(st.sampled_from([t for t in (1, 2, 4) if declaration.num_kv_heads % t == 0]))
    sizes = {"tensor": tensor, **draw(stages(declaration.num_layers))}
    replicas = [(c, d) for c in (1, 2) for d in (1, 2) if tensor * sizes.get("pipeline", 1) * c * d <= 16]
    sizes["context"], data = draw(st.sampled_from(replicas))
    vocab = tensor * draw(st.integers(1, 5))
    if declaration.num_experts:  # over all ranks of a stage, in any way that divides them
        ranks = tensor * sizes["context"] * data
        spread = [e for e in (1, 2, 4) if declaration.num_experts % e == 0 and ranks % e == 0]
        sizes["expert"] = draw(st.sampled_from(spread))
        split = [s for s in (1, 2, 4) if ranks // sizes["expert"] % s == 0]
        sizes["expert_tensor"] = draw(st.sampled_from(split))
    return megatron(declaration, vocab, draw(st.booleans()), data=data, **sizes)[0]


@st.composite
def sglang_layouts(draw: st.DrawFn, declaration: Declaration) -> Layout:
    """At most 8 ranks."""
    heads, kv_heads = declaration.num_heads, declaration.num_kv_heads

    def attends(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    tensor = draw(st.sampled_from([t for t in (1, 2, 4) if attends(t)]))
    vocab = math.lcm(tensor, draw(st.sampled_from([8, 64])))
    expert = draw(st.sampled_from([e for e in (1, 2, 4) if tensor % e == 0 and declaration.num_experts % e == 0]))
    copies, with_head = 1, False
    if declaration.copies_attention:
        copies = draw(st.sampled_from([c for c in (1, 2, 4) if tensor % c == 0 and attends(tensor // c)]))
        with_head = draw(st.booleans()) and (copies == tensor or declaration.vocab_size % vocab == 0)
    return sglang_layout(declaration, tensor, draw(st.integers(1, 2)), vocab, expert, copies, with_head)
