"""Add a sublayer's output to a residual stream of a wider dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

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
