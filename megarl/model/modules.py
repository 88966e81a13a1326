"""Megatron modules of our own: used where Transformer Engine is not, and the critic's head.

Letters: T packed tokens of this rank, H hidden size, h query heads, g key-value heads, d channels a head.
"""

# ruff: noqa: E402
from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from megarl.compat.megatron_cpu import install
from megarl.parallel.device import device

install()

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) x weight. Under sequence parallel each tensor rank sees its own tokens only, so the weight is marked
    for Megatron to sum its gradient over the tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, by torch's scaled_dot_product_attention.

    Under context parallel this rank holds two chunks of each sequence (zig-zag, see data/packing.py); the keys and
    values of the others are gathered, and their gradients summed back."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, "only causal attention is built"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context_group = groups.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """query [T, h, d], key and value [T, g, d], to [T, h x d]."""
        assert packed_seq_params is not None, "sequences must be packed"
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if self.context_group.size() == 1:
            parts = [
                _causal_attention(query[start:end], key[start:end], value[start:end], self.scale)
                for start, end in pairwise(bounds)
            ]
        else:
            parts = self._attend_over_context(query, key, value, bounds)
        return torch.cat(parts).flatten(1)

    def _attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]
    ) -> list[torch.Tensor]:
        size, rank = self.context_group.size(), self.context_group.rank()
        # Forward gathers, backward sums each rank's part over the ranks: Megatron's mapping for sequence parallel.
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.context_group
        )
        of_rank = gathered.chunk(size)
        outputs = []
        for start, end in pairwise(bounds):
            chunk = (end - start) // (2 * size)
            here = start // size
            halves = [part[here : here + 2 * chunk].split(chunk) for part in of_rank]
            in_order = [first for first, _ in halves] + [second for _, second in reversed(halves)]
            keys, values = torch.cat(in_order).split([key.shape[-1], value.shape[-1]], dim=-1)
            for half, position in enumerate((rank, 2 * size - 1 - rank)):
                queries = query[here + half * chunk : here + (half + 1) * chunk]
                seen = (position + 1) * chunk
                outputs.append(_causal_attention(queries, keys[:seen], values[:seen], self.scale))
        return outputs


def _causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The last query sees all keys. query [q, h, d], key and value [k, g, d], q <= k; to [q, h, d]."""
    num_queries, num_keys = len(query), len(key)
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if num_queries == num_keys:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


class ValueHead(MegatronModule):
    """One value a token in place of the vocabulary's logits; starts at zero. Stands where GPTModel has its output
    layer.

    The weight [1, H] is the same on all tensor ranks. Without sequence parallel all of them see all tokens and compute
    the same gradient. With it each sees its own tokens: the values, not the wide hidden states, are gathered; in
    backward each rank takes its own tokens' part; and the weight is marked for Megatron to sum its gradient over the
    ranks."""

    def __init__(self, config: TransformerConfig, tensor_group: Any) -> None:
        super().__init__(config=config)
        self.tensor_group = tensor_group
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden [T (/ tensor), 1, H] to (values [T, 1, 1] in float32, no bias)."""
        assert weight is None, "the critic shares no weight with its embedding"
        values = F.linear(hidden.float(), self.weight.float())
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tensor_group
            )
        return values, None
