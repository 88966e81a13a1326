"""Scaled rotary embeddings: log-probs of transformers on positions far beyond the original length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from reference_weights import VOCAB_SIZE, load, tiny_model
from test_engine import LAYOUTS, reference_outputs, value_head, weights_of

from megarl.config import ParallelConfig
from megarl.data.packing import TokenSequence, pack
from megarl.engines.megatron import MegatronEngine

ORIGINAL = 24  # the sequences below have 120 tokens
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 6.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "yarn": (
        "qwen3",
        {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 4},
    ),
    "yarn mscale": (
        "qwen2",
        {
            "rope_type": "yarn",
            "factor": 5.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 0.5,
            "mscale_all_dim": 2.0,
        },
    ),
}


def long_sequences_agree(kind: str, rope: dict[str, Any], parallel: ParallelConfig) -> float:
    """Returns the greatest difference."""
    model = tiny_model(kind, rope={"rope_theta": 10000.0, **rope})
    engine = MegatronEngine("actor", model.config, parallel, "fp32", timeout=30)
    head = value_head()
    load(engine, weights_of(model, head))
    generator = np.random.default_rng(1)
    lengths = [5, 120, 64]
    sequences = [TokenSequence(generator.integers(0, VOCAB_SIZE, n), 1, np.ones(n - 1, dtype=bool)) for n in lengths]
    batch = pack(sequences, {}, multiple=parallel.sequence_multiple)
    (found,) = engine.forward([batch], 1.0)
    with torch.no_grad():
        wanted = reference_outputs(model, head, batch, temperature=1.0).logprobs
    assert wanted is not None
    error = float(np.abs(found["logprobs"] - wanted.numpy())[batch.mask].max())
    assert error < 1e-5, error
    return error


@pytest.mark.parametrize("layout", ["tp2sp", "cp2"])
@pytest.mark.parametrize("scaled", SCALED)
def test_scaled_embeddings_have_the_logprobs_of_transformers(scaled: str, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    run(long_sequences_agree, num_ranks, *SCALED[scaled], parallel)
