"""The tiny tokenizer and models load through transformers' Auto classes and are the same for the same seed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.prompts import PromptSet, Row
from megarl.data.tiny import write_tiny_model, write_tiny_tokenizer

ALPHABET = "0123456789+-*= \n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), ALPHABET))


def test_a_character_is_a_token_and_special_tokens_come_first(tokenizer):
    assert len(tokenizer) == 4 + len(ALPHABET)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    assert tokenizer("01+")["input_ids"] == [4, 5, 14]


@pytest.mark.parametrize("text", ["3+5=8", " 1  2\n\n3 ", ""])
def test_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([*tokenizer(text)["input_ids"], 1, 0], skip_special_tokens=True) == text


def test_each_unknown_character_is_one_unknown_token(tokenizer):
    assert tokenizer("1xy2")["input_ids"] == [5, 3, 3, 6]


def test_the_chat_template_adds_nothing(tokenizer):
    row = Row("s", [{"role": "user", "content": "3+5="}], "8")
    (prompt,) = PromptSet.build([row], tokenizer, 10).prompts
    assert prompt.token_ids.tolist() == [7, 14, 9, 17]


def test_an_alphabet_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        write_tiny_tokenizer(tmp_path, "")
    with pytest.raises(ValueError, match="'ab' more than once"):
        write_tiny_tokenizer(tmp_path, "abcba")


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True)])
def test_a_model_loads_and_has_the_sizes_asked_for(tmp_path, kind, tied):
    write_tiny_tokenizer(tmp_path, ALPHABET)
    options = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48}
    write_tiny_model(tmp_path, kind, tie_embeddings=tied, init_std=0.5, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = model.config
    assert (config.model_type, config.vocab_size, config.tie_word_embeddings) == (kind, 20, tied)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 3, 48)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    layer = model.model.layers[0]
    assert (layer.self_attn.q_proj.bias is not None) == (kind == "qwen2")
    assert (layer.input_layernorm.weight == 1).all()
    weights = layer.mlp.up_proj.weight
    assert weights.std().item() == pytest.approx(0.5, rel=4 / math.sqrt(2 * weights.numel()))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[7, 14, 9]])).logits).all()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_the_same_seed_writes_the_same_weights_and_leaves_torchs_seed_alone(tmp_path):
    weights = []
    for number, seed in enumerate((3, 3, 4)):
        folder = write_tiny_tokenizer(tmp_path / str(number), ALPHABET)
        torch.manual_seed(number)
        before = torch.random.get_rng_state()
        write_tiny_model(folder, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=16, seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_model_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer in"):
        write_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="unknown kind of model 'gpt2'"):
        write_tiny_model(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="hidden_size 30 / num_heads 4"):
        write_tiny_model(tmp_path, hidden_size=30)
    with pytest.raises(ValueError, match="num_kv_heads 3 does not divide num_heads 4"):
        write_tiny_model(tmp_path, num_kv_heads=3)
