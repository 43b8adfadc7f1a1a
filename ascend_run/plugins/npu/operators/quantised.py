"""Products of quantised operands, and whole feed-forwards; for inference."""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_ROWS: Final = 0
_ONE_TENSOR: Final = 3
ACTIVATIONS: Final = {None: 0, "relu": 1, "gelu_tanh": 2, "fastgelu": 4, "silu": 5}
"""``act_type`` of a quantised grouped product."""
FFN_ACTIVATIONS: Final = ("fastgelu", "gelu", "relu", "silu")
"""Of a feed-forward; its gated ones are for float16 without experts, in an order of halves that is
not documented."""


def trans_quant_param(scale: Tensor) -> Tensor:
    """float32 scales as the int64 that integer products are dequantised with.

    Any shape; the value loses all but 10 bits of its mantissa.
    """
    return torch.ops.npu.npu_trans_quant_param(scale.float().flatten()).view(scale.shape)


def quant_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    scale_XN: Tensor,
    group_list: Tensor,
    *,
    per_group: bool,
    per_token_scale_T: Tensor | None,
    bias_XN: Tensor | None,
    activation: str | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    """[T, N]: ``act((x @ matrix + bias) * scale * per_token_scale)`` of int8 operands.

    Args:
        scale_XN: bfloat16 or float32 for an output of bfloat16 or float16, encoded int64 for int8.
        per_group: Whether the list holds each group's rows, not running totals.
        output_dtype: None for int8.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        bias=None if bias_XN is None else [bias_XN],
        scale=[scale_XN],
        per_token_scale=None if per_token_scale_T is None else [per_token_scale_T],
        group_list=group_list,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=int(per_group),
        act_type=ACTIVATIONS[activation],
        output_dtype=output_dtype,
    )
    return y


def weight_quant_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    scale_XN: Tensor,
    offset_XN: Tensor,
    group_list: Tensor,
    *,
    per_group: bool,
    bias_XN: Tensor | None,
) -> Tensor:
    """[T, N]: ``x @ ((matrix + offset) * scale) + bias`` of int8 matrices."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x_TK],
        [matrices_XKN],
        bias=None if bias_XN is None else [bias_XN],
        antiquant_scale=[scale_XN],
        antiquant_offset=[offset_XN],
        group_list=group_list,
        split_item=_ONE_TENSOR,
        group_type=_ROWS,
        group_list_type=int(per_group),
    )
    return y


def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    experts: Sequence[int] | None,
    **options: Any,
) -> Tensor:
    """``act(x @ weight1 + bias1) @ weight2 + bias2``; quantised as the scales say.

    Args:
        experts: Rows of each expert.
        options: By the operator's names: bias1 and bias2; scale, offset, deq_scale1 and deq_scale2
            (and output_dtype) of int8 operands; antiquant_scale1 ... of int8 weights.
    """
    tokens = None if experts is None else list(experts)
    return torch.ops.npu.npu_ffn(x, weight1, weight2, activation, expert_tokens=tokens, **options)
