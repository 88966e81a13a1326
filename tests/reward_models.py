"""Reward models small enough for tests: sequence classification with random weights, as transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.data.tiny import write_tiny_tokenizer

ALPHABET = "ua<>=+0123456789"
"""Token 4 is u, 5 a, 6 <, 7 >, 8 =, 9 +, and 10 to 19 are the digits."""
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}<{{ message['content'] }}>{% endfor %}"
"""u<3+5=>a<8>"""

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def write_reward_model(
    folder: Path, kind: str = "llama", head: float = 0.2, num_labels: int = 1, **options: Any
) -> Path:
    """A model of two layers with a tokenizer and a chat template of its own. head: standard deviation of its head."""
    write_tiny_tokenizer(folder, ALPHABET)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = CONFIGS[kind](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_labels=num_labels,
        **{"head_dim": 16, "pad_token_id": 0, **options},
    )
    model = transformers.AutoModelForSequenceClassification.from_config(shape).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = head if name == "score.weight" else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + (1.0 if "norm" in name else 0))
    model.save_pretrained(folder)
    return folder
