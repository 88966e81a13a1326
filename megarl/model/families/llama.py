"""Llama 1 to 3 and Mistral: attention without biases, gated feed-forward, RMS norms. Qwen2 adds biases to this."""

from __future__ import annotations

from typing import Any

from megarl.reshard.declaration import QKV, Declaration, GateUp, Names, Op, RowSplit, VocabSplit, Whole


def llama(hf_config: Any) -> Declaration:
    """The declaration for a LlamaConfig or MistralConfig."""
    hidden, ffn = hf_config.hidden_size, hf_config.intermediate_size
    vocab = (hf_config.vocab_size, hidden)
    attention_out = hf_config.num_attention_heads * head_dim(hf_config)
    layer: tuple[Op, ...] = (
        Whole(
            "input_layernorm.weight",
            Names("input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            (hidden,),
        ),
        qkv(hf_config, "weight"),
        RowSplit(
            "self_attn.o_proj.weight",
            Names("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
            (hidden, attention_out),
            of_attention=True,
        ),
        Whole(
            "post_attention_layernorm.weight",
            Names("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            (hidden,),
        ),
        GateUp(
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            Names("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
            (ffn, hidden),
        ),
        RowSplit("mlp.down_proj.weight", Names("mlp.linear_fc2.weight", "mlp.down_proj.weight"), (hidden, ffn)),
    )
    return Declaration(
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        ffn_size=ffn,
        vocab_size=hf_config.vocab_size,
        embedding=VocabSplit(
            "model.embed_tokens.weight",
            Names("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            vocab,
            of_attention=True,
        ),
        layers=(layer,) * hf_config.num_hidden_layers,
        final_norm=Whole("model.norm.weight", Names("decoder.final_layernorm.weight", "model.norm.weight"), (hidden,)),
        head=None
        if hf_config.tie_word_embeddings
        else VocabSplit("lm_head.weight", Names("output_layer.weight", "lm_head.weight"), vocab),
    )


def qkv(hf_config: Any, suffix: str) -> QKV:
    """The fused attention input: `suffix` weight or bias."""
    query, key, value = (f"self_attn.{name}_proj.{suffix}" for name in "qkv")
    return QKV(
        query,
        key,
        value,
        Names(f"self_attention.linear_qkv.{suffix}", f"self_attn.qkv_proj.{suffix}"),
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim(hf_config),
        cols=hf_config.hidden_size if suffix == "weight" else 1,
    )


def head_dim(hf_config: Any) -> int:
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)
