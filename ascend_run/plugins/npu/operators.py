"""Every call of a torch_npu operator, and no other code: one function an operator.

What stands here is what has to be proven without the device: that the operator takes these
arguments (against its schema and its meta kernel), and that it computes what the caller means
(against a reference kernel of the same name, written from its documentation).

The operators are reached through ``torch.ops.npu``, where ``torch_npu`` registers them.
Source: torch_npu's operator documentation (Ascend Extension for PyTorch, API reference).
"""

# S queries, J keys, B batch, N query heads, G key-value heads, D head width, T tokens, H hidden
# size, F expert width, X groups

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

_CUMULATIVE, _ROWS, _INNER, _ONE_TENSOR = 0, 0, 2, 3
"""``group_list_type`` of running totals; ``group_type`` of groups of rows and of the summed axis;
``split_item`` of a single output."""


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


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised, reciprocal root mean square in float32, one a row)."""
    y, inverse = torch.ops.npu.npu_rms_norm(x, weight_H, eps)
    return y, inverse


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight_H: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of the weight, in float32)."""
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(dy, x, weight_H, inverse)
    return dx, dweight


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] (gate, then up) -> [..., F]: ``silu(gate) * up``."""
    return torch.ops.npu.npu_swiglu(gate_up, -1)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of ``gate_up``."""
    return torch.ops.npu.npu_swiglu_backward(dy, gate_up, -1)


def rotary_mul(x_SBND: Tensor, cos_S11D: Tensor, sin_S11D: Tensor, interleaved: bool) -> Tensor:
    """``x * cos + turned * sin``, turned being (-second, first) of each pair."""
    mode = "interleave" if interleaved else "half"
    return torch.ops.npu.npu_rotary_mul(x_SBND, cos_S11D, sin_S11D, mode)


def grouped_matmul(x_TK: Tensor, matrices_XKN: Tensor, ends_X: Tensor) -> Tensor:
    """[T, N]: each row times the matrix of its group.

    Args:
        matrices_XKN: Contiguous, or a transposed view of a contiguous tensor.
        ends_X: Running totals of the groups' rows, int64.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        group_list=ends_X,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=_CUMULATIVE,
    )
    return y


def grouped_outer(a_NT: Tensor, b_TK: Tensor, ends_X: Tensor) -> Tensor:
    """[X, N, K]: the product over the rows of each group, ``a`` being a transposed view."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [a_NT],
        [b_TK],
        group_list=ends_X,
        split_item=_ONE_TENSOR,
        group_type=_INNER,
        group_list_type=_CUMULATIVE,
    )
    return y
