"""A tokenizer and a model small enough for a laptop, made on the spot as Hugging Face folders: for the quickstart and
for tests."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Literal

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK)

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The messages' contents as they are, with nothing around them: the answer follows the prompt at once."""


def write_tiny_tokenizer(folder: str | os.PathLike[str], alphabet: str) -> Path:
    """Write a tokenizer with one token a character to `folder`, which AutoTokenizer loads; gives the folder.

    Token 0 is <pad>, 1 <eos>, 2 <bos>, 3 <unk> (for characters that are not in the alphabet); then the alphabet in its
    order. It adds no special tokens by itself.

    Raises ValueError when the alphabet is empty or names a character twice.
    """
    from tokenizers import Tokenizer, decoders, models  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ValueError("the alphabet is empty; give the characters that prompts and answers are made of")
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice:
        raise ValueError(f"the alphabet names {''.join(twice)!r} more than once; each character is one token")
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    # BPE without merges leaves single characters, four times as fast as splitting them off before a word-level model.
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNK, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return Path(folder)


def write_tiny_model(
    folder: str | os.PathLike[str],
    kind: Literal["llama", "qwen2"] = "llama",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    ffn_size: int = 128,
    tie_embeddings: bool = False,
    init_std: float = 0.02,
    seed: int = 0,
    max_positions: int = 4096,
) -> Path:
    """Write a model with random weights beside the tokenizer that is already in `folder`; gives the folder.

    config.json, float32 safetensors, generation_config.json that ends on the tokenizer's EOS. The vocabulary is the
    tokenizer's. Norms are 1; everything else, Qwen2's biases too, is drawn from a normal distribution with standard
    deviation `init_std`, each parameter from (seed, its name) alone: the same arguments write the same bytes, whatever
    torch's global seed, which is left as it was.

    Raises ValueError when there is no tokenizer in the folder, the kind is unknown, or the sizes do not divide.
    """
    _check_sizes(kind, hidden_size, num_heads, num_kv_heads)
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise ValueError(f"no tokenizer in {folder}; call write_tiny_tokenizer on the folder first")
    import torch
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        initializer_range=init_std,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(_parameter_seed(seed, name))
                parameter.normal_(0.0, init_std, generator=generator)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    return Path(folder)


def _check_sizes(kind: str, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"unknown kind of model {kind!r}; there are llama and qwen2")
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(
            f"hidden_size {hidden_size} / num_heads {num_heads} must be an even number (rotary embeddings turn pairs); "
            f"change one of them"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}; change one of them")


def _parameter_seed(seed: int, name: str) -> int:
    # torch's CPU generator looks at the lower 32 bits of a seed only.
    return zlib.crc32(f"{seed}/{name}".encode())
