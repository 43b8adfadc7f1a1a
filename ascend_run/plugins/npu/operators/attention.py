"""Fused attention, forward and backward."""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

STATISTICS_WIDTH: Final = 8
"""The softmax statistics are repeated so often along a last axis."""
COMPRESSED_MASK_SIZE: Final = 2048
"""Side of the one triangular mask that every causal or banded call is given."""
ALL_TOKENS: Final = 2**31 - 1
"""``pre_tockens`` and ``next_tockens`` that hide nothing (the operator's spelling)."""

FULL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 0, 2, 3, 4
"""Values of ``sparse_mode``: no mask; diagonal from the upper left or to the lower right corner;
a band whose borders are counted from the lower right corner."""


class AttentionOut(NamedTuple):
    """What the attention's forward answers, as far as it is used."""

    out: Tensor
    softmax_max: Tensor
    """Largest score of each query, repeated 8 times, float32: [B, N, S, 8], or [T, N, 8]."""
    softmax_sum: Tensor
    """Sum of ``exp(score - max)`` of each query, alike."""


class Sparsity(NamedTuple):
    """Which scores the attention computes."""

    mode: int = FULL
    mask: Tensor | None = None
    """[2048, 2048] bool, True above the diagonal: the mask of every mode but ``FULL``."""
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    query_ends: Sequence[int] | None = None
    """Running totals of query lengths, with layout TND."""
    key_ends: Sequence[int] | None = None

    def arguments(self, layout: str) -> dict[str, Any]:
        return {
            "atten_mask": self.mask,
            "sparse_mode": self.mode,
            "pre_tockens": self.pre_tokens,
            "next_tockens": self.next_tokens,
            "actual_seq_qlen": None if self.query_ends is None else list(self.query_ends),
            "actual_seq_kvlen": None if self.key_ends is None else list(self.key_ends),
            "softmax_layout": "TND" if layout == "TND" else "",
        }


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    sparsity: Sparsity,
) -> AttentionOut:
    """``softmax(scale * q @ k.T) @ v``.

    Args:
        query: [S, B, N * D] with layout SBH, [T, N, D] with layout TND.
        key: [J, B, G * D] or [T, G, D]; value alike.
        heads: N.
    """
    out, softmax_max, softmax_sum, *_ = torch.ops.npu.npu_fusion_attention(
        query, key, value, heads, layout, scale=scale, **sparsity.arguments(layout)
    )
    return AttentionOut(out, softmax_max, softmax_sum)


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    sparsity: Sparsity,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the forward's output and statistics."""
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        query,
        key,
        value,
        dout,
        heads,
        layout,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        attention_in=out,
        scale_value=scale,
        **sparsity.arguments(layout),
    )
    return dq, dk, dv
