"""What of an engine's parameters is summed, and how a parameter that does not fit is named."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from megarl.model.families import declare
from megarl.reshard.layouts import sglang_layout
from megarl.reshard.transports import ChecksumRegion
from megarl.workers.weights import checksum_regions, compare_parameters


def test_parameters_are_compared_by_name_and_shape() -> None:
    planned = {"a": (2, 3), "b": (4,)}
    compare_parameters(planned, {"b": (4,), "a": (2, 3)}, "replica 0")
    for actual, said in (
        ({"a": (2, 3)}, r"replica 0: parameter b is missing in the engine, \(4,\) in the plan"),
        ({**planned, "c": (1,)}, r"replica 0: parameter c is \(1,\) in the engine, missing in the plan"),
        ({**planned, "a": (3, 2)}, r"replica 0: parameter a is \(3, 2\) in the engine, \(2, 3\) in the plan"),
    ):
        with pytest.raises(ValueError, match=said):
            compare_parameters(planned, actual, "replica 0")


def test_an_engine_rank_sums_its_own_part_of_each_tensor() -> None:
    """The second of two tensor-parallel ranks of SGLang has the second half of gate, up and down (hidden 8, FFN 6)."""
    shape = LlamaConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=6,
        num_hidden_layers=1,
        vocab_size=64,
    )
    layout = sglang_layout(declare(shape), 2, 1, 64)
    regions = checksum_regions(layout, 1)
    assert len(regions) == len(layout.shard(1).pieces)
    gate_up, down = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert [r for r in regions if r.parameter == gate_up] == [
        ChecksumRegion(gate_up, (0, 3), (0, 8), 3, 0, 8),
        ChecksumRegion(gate_up, (3, 6), (0, 8), 3, 0, 8),
    ]
    assert [r for r in regions if r.parameter == down] == [ChecksumRegion(down, (0, 8), (0, 3), 0, 3, 6)]
