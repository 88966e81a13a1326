"""Custom weight loaders of SGLang for tests: they load nothing, but tell every parameter's bytes or spoil them.

Imported by SGLang's scheduler processes: torch and the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megarl.reshard.transports import answer

SPOILT = 0x7FC00BAD
"""The bits of a float32 NaN that no computation makes."""


def hash_parameters(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Result: {name: [is a parameter, dtype, shape, SHA-256 of the filled rows, of the other rows]} of all parameters
    and buffers.

    The envelope says how many rows are filled: {"reply": ..., "filled": {"lm_head.weight": 35}}; all, where it names
    none.
    """

    def work(envelope: Mapping[str, Any]) -> dict[str, list[Any]]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: _describe(value, envelope["filled"].get(name, len(value))) for name, value in tensors}

    answer(named_tensors, work)


def spoil_parameters(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Overwrite every parameter, padding too, with NaNs. Result: how many."""

    def work(_: Mapping[str, Any]) -> int:
        parameters = [parameter.data for parameter in model.parameters()]
        for parameter in parameters:
            parameter.view(torch.int32).fill_(SPOILT)
        return len(parameters)

    answer(named_tensors, work)


def _describe(value: Tensor, filled: int) -> list[Any]:
    is_parameter = isinstance(value, nn.Parameter)
    rows = value.detach()
    return [is_parameter, str(value.dtype), list(value.shape), _sha256(rows[:filled]), _sha256(rows[filled:])]


def _sha256(values: Tensor) -> str:
    """Of the bytes of the elements, in their order."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
