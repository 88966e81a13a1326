"""Build a role's model: Megatron's GPTModel, in as many chunks as the rank has virtual pipeline stages."""

# ruff: noqa: E402
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.compat.megatron_cpu import install
from megarl.config import ParallelConfig, RecomputeConfig
from megarl.parallel.device import device, is_cuda

install()

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.model.hf_config import Precision, Role, padded_vocab_size, rope_theta, transformer_config
from megarl.model.modules import PackedAttention, RMSNorm, ValueHead


class LanguageModel(GPTModel):
    """GPTModel that can stop before its output layer, for log-probs that are fused with it (parallel/vocab.py)."""

    stops_at_hidden = False

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.post_process and self.stops_at_hidden:
            return hidden_states  # [T (/ tensor with sequence parallel), 1, H], behind the last norm
        return super()._postprocess(hidden_states, *args, **kwargs)

    def whole_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` gave, as all tensor ranks need it: [T, H]. In backward it sums the ranks' gradients."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group)[:, 0]
        return copy_to_tensor_model_parallel_region(hidden, group=group)[:, 0]

    @property
    def output_weight(self) -> torch.Tensor:
        """[V / tensor, H] of the output layer; the embedding's where they are tied and both here."""
        weight = self.output_layer.weight
        return self.shared_embedding_or_output_weight() if weight is None else weight


def use_transformer_engine(precision: Precision) -> bool:
    """The one place that decides whose layers are built. Transformer Engine's packed attention is for bf16 only."""
    return is_cuda() and precision == "bf16" and gpt_layer_specs.HAVE_TE


def build_model(
    hf_config: Any,
    role: Role,
    parallel: ParallelConfig,
    precision: Precision = "bf16",
    recompute: RecomputeConfig | None = None,
) -> list[LanguageModel]:
    """The chunks of the model that this rank holds, with random weights, on the device. Call it with the role's groups
    active.

    The critic has a ValueHead in place of the output layer (and never tied embeddings); the reference has no gradients.

    Raises ValueError when the model cannot be expressed or the sizes do not divide it."""
    transformer_engine = use_transformer_engine(precision)
    config = transformer_config(
        hf_config, parallel, precision, recompute, trains=role != "reference", transformer_engine=transformer_engine
    )
    stages: Sequence[int | None] = range(parallel.virtual_pipeline) if parallel.virtual_pipeline > 1 else [None]
    return [_build_chunk(hf_config, role, config, transformer_engine, stage) for stage in stages]


def _build_chunk(
    hf_config: Any, role: Role, config: TransformerConfig, transformer_engine: bool, virtual_stage: int | None
) -> LanguageModel:
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    if transformer_engine:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)
    else:
        spec = _own_block_spec(config, virtual_stage)
    model = LanguageModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=is_last,
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and role != "critic",
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
        vp_stage=virtual_stage,
    )
    if role == "critic" and is_last:
        model.output_layer = ValueHead(config, model.pg_collection.tp)
    if role == "reference":
        model.requires_grad_(False)
    return model.to(device())


def _own_block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


# ------------------------------------------------------------------------------------------------ names


def unwrapped(chunk: torch.nn.Module) -> LanguageModel:
    """The model inside wrappers such as DistributedDataParallel."""
    while not isinstance(chunk, LanguageModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def local_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, under Megatron's names but with the layers' global numbers, from 0:

        embedding.word_embeddings.weight                             first stage
        decoder.layers.<n>.self_attention.linear_qkv.{weight,bias}   bias: qwen2
        decoder.layers.<n>.self_attention.linear_proj.weight
        decoder.layers.<n>.self_attention.{q,k}_layernorm.weight     qwen3; the same names with Transformer Engine
        decoder.layers.<n>.mlp.linear_fc1.weight                     [gate; up]
        decoder.layers.<n>.mlp.linear_fc2.weight
        decoder.final_layernorm.weight                               last stage
        output_layer.weight                                          last stage; the critic's is [1, H]; tied: only
                                                                     where another stage has the embedding

    and the two norms of a layer: with Transformer Engine (`uses_fused_norms`)
    self_attention.linear_qkv.layer_norm_weight and mlp.linear_fc1.layer_norm_weight, else input_layernorm.weight and
    pre_mlp_layernorm.weight."""
    return {name: parameter for chunk in chunks for name, parameter in _named(unwrapped(chunk))}


def _named(model: LanguageModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in model.named_parameters():
        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found:
            number = model.decoder.layers[int(found[1])].layer_number - 1
            name = f"decoder.layers.{number}.{found[2]}"
        yield name, parameter


def uses_fused_norms(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the layer norms are parts of the linear layers behind them (Transformer Engine)."""
    return any(name.endswith("linear_qkv.layer_norm_weight") for name in local_parameters(chunks))
