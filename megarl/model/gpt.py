"""Build a role's model: Megatron's GPTModel, in as many chunks as the rank has virtual pipeline stages."""

# ruff: noqa: E402
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megarl.compat.megatron_cpu import install, mark_expert_parameters
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
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.model.families import VALUE_ROLES
from megarl.model.hf_config import FORWARD_ONLY_ROLES, Precision, Role, padded_vocab_size, transformer_config
from megarl.model.modules import PackedAttention, RMSNorm, ValueHead
from megarl.model.rope import rotary
from megarl.model.swiglu import use_gated_mlps


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
    offload_activations: Sequence[str] = (),
) -> list[LanguageModel]:
    """The chunks of the model that this rank holds, with random weights, on the device. Call it with the role's groups
    active.

    Critic and reward model have a ValueHead in place of the output layer (and never tied embeddings); reference and
    reward model have no gradients.

    Raises ValueError when the model cannot be expressed, the sizes do not divide it, or selective recompute names what
    it has not."""
    transformer_engine, trains = use_transformer_engine(precision), role not in FORWARD_ONLY_ROLES
    config = transformer_config(
        hf_config, parallel, precision, recompute, trains, transformer_engine, offload_activations
    )
    stages: Sequence[int | None] = range(parallel.virtual_pipeline) if parallel.virtual_pipeline > 1 else [None]
    chunks = [_build_chunk(hf_config, role, config, transformer_engine, stage) for stage in stages]
    for chunk in chunks:
        use_gated_mlps(chunk.decoder.layers, recomputes_swiglu(recompute))
        if trains:
            _accumulate_in_products(chunk)
    if config.recompute_granularity == "selective":
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        check_recomputed(config.recompute_modules, layers, parallel_state.get_pipeline_model_parallel_group())
    return chunks


def recomputes_swiglu(recompute: RecomputeConfig | None) -> bool:
    """Whether the activation is dropped and made again; not where all of the layer or of its MLP is made again."""
    recompute = recompute or RecomputeConfig()
    covered = recompute.kind == "full" or (recompute.kind == "selective" and "mlp" in recompute.modules)
    return recompute.swiglu and not covered


def _accumulate_in_products(chunk: LanguageModel) -> None:
    """Let Transformer Engine's products add weight gradients to main_grad, in float32, in place of a bf16 gradient that
    is added later. The configuration's switch (gradient_accumulation_fusion) would ask for Apex in the output layer."""
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def check_recomputed(modules: Sequence[str], layers: Sequence[Any], pipeline_group: Any = None) -> None:
    """Raises ValueError for a module of selective recompute that no layer has: Megatron would pass it over. layers: of
    this rank; those of the group's others count too."""
    has: dict[str, Callable[[Any], bool]] = {
        "layernorm": lambda layer: layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm,
        "mlp": lambda layer: layer.recompute_mlp,
        "moe": lambda layer: getattr(layer.mlp, "moe_layer_recompute", False),
    }
    found = torch.tensor([name not in has or any(map(has[name], layers)) for name in modules], device=device()).int()
    if pipeline_group is not None and pipeline_group.size() > 1:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=pipeline_group)
    for name, is_found in zip(modules, found.tolist(), strict=True):
        if not is_found:
            raise ValueError(
                f"recompute.modules has {name}, but no layer has one of its own (Transformer Engine computes the norms "
                f"of dense layers inside the linear ones; mlp is of dense layers, moe of layers of experts); leave it "
                f"out"
            )


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
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and role not in VALUE_ROLES,
        position_embedding_type="rope",
        vp_stage=virtual_stage,
    )
    # Plain or scaled alike. It is no buffer, so it follows no `to`; the angles are made from it in the first forward.
    model.rotary_pos_emb.inv_freq = rotary(hf_config).inverse_frequencies.to(device())
    mark_expert_parameters(model)
    if role in VALUE_ROLES and is_last:
        model.output_layer = ValueHead(config, model.pg_collection.tp)
    if role in FORWARD_ONLY_ROLES:
        model.requires_grad_(False)
    return model.to(device())


def _own_block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    dense = _own_layer_spec(config, None)
    routed = _own_layer_spec(config, config.num_moe_experts) if config.num_moe_experts else dense
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage))
    with_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    specs = [routed if with_experts[layer] else dense for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _own_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


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
        output_layer.weight                                          last stage; a value head's is [1, H]; tied: only
                                                                     where another stage has the embedding

    a layer with experts has, in place of the two mlp.linear_fc*.weight and with the experts' local numbers,

        decoder.layers.<n>.mlp.router.weight
        decoder.layers.<n>.mlp.experts.local_experts.<e>.linear_fc{1,2}.weight   with Transformer Engine:
        decoder.layers.<n>.mlp.experts.linear_fc{1,2}.weight<e>

    and the two norms of a layer: with Transformer Engine (`uses_fused_norms`)
    self_attention.linear_qkv.layer_norm_weight and mlp.linear_fc1.layer_norm_weight (pre_mlp_layernorm.weight where
    there are experts), else input_layernorm.weight and pre_mlp_layernorm.weight."""
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
