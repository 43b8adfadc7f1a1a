"""Add a sublayer's output to the residual stream: of a wider dtype, normalized, or scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

Add: TypeAlias = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def wide_bias_dropout_add(
    training: bool, fused: bool, norm: nn.Module | None = None, multiplier: float = 1.0
) -> Add:
    """Replacement of Megatron's ``get_bias_dropout_add`` that keeps the residual's dtype.

    Megatron's casts the residual to the dtype of the sublayer's output, which narrows the stream
    after the first sublayer, with ``fp32_residual_connection``.

    Args:
        fused: Ignored: Megatron's fused version computes the same formula.
        norm, multiplier: See ``ResidualAdd``.
    """

    def add(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        """x [S, B, H], bias [H] or None, residual [S, B, H] -> same shape and dtype as residual."""
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        x = F.dropout(x if norm is None else norm(x), p=probability, training=training)
        return residual + (x if multiplier == 1.0 else x * multiplier)

    return add


class ResidualAdd(nn.Module):
    """``residual + multiplier * dropout(norm(x + bias))``; called as Megatron's function is.

    Args:
        norm: Norm of the sublayer's output; None for none.
    """

    def __init__(
        self, config: TransformerConfig, norm: ModuleSpec | type | None, multiplier: float
    ) -> None:
        super().__init__()
        self.norm: nn.Module | None = None
        if norm is not None:
            self.norm = build_module(
                norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        self.multiplier = multiplier

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the addition."""
        return wide_bias_dropout_add(training, fused, self.norm, self.multiplier)
