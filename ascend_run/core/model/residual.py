"""Add a sublayer's output to the residual stream: of a wider dtype, normalized, or scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

Add: TypeAlias = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def wide_bias_dropout_add(training: bool, fused: bool) -> Add:
    """Replacement of Megatron's ``get_bias_dropout_add`` for ``fp32_residual_connection``.

    Megatron's casts the residual to the dtype of the sublayer's output, which narrows the stream
    after the first sublayer.

    Args:
        fused: Ignored: Megatron's fused version computes the same formula.
    """

    def add(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        """x [S, B, H], bias [H] or None, residual [S, B, H] -> same shape and dtype as residual."""
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        return residual + F.dropout(x, p=probability, training=training)

    return add


class ResidualAdd(nn.Module):
    """``residual + multiplier * dropout(norm(x + bias))``; called as Megatron's function is.

    The residual stream keeps its dtype.

    Args:
        norm: Norm of the sublayer's output; None for none.
    """

    def __init__(
        self, config: TransformerConfig, norm: ModuleSpec | type | None, multiplier: float
    ) -> None:
        super().__init__()
        self.norm = norm and build_module(
            norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.multiplier = multiplier

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the addition.

        Args:
            fused: Ignored, as in ``wide_bias_dropout_add``.
        """

        def add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            x, bias = x_with_bias
            x = x if bias is None else x + bias
            x = x if self.norm is None else self.norm(x)
            x = F.dropout(x, p=probability, training=training)
            return residual + (x if self.multiplier == 1.0 else x * self.multiplier)

        return add
