"""Matmuls of quantised operands, and MLPs; for inference."""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_ROWS: Final = 0
_ONE_TENSOR: Final = 3
ACTIVATIONS: Final = {None: 0, "relu": 1, "gelu_tanh": 2, "fastgelu": 4, "silu": 5}
"""``act_type`` of a quantised grouped matmul."""
FFN_ACTIVATIONS: Final = ("fastgelu", "gelu", "relu", "silu")
"""Activations of an MLP; the operator's gated ones support only float16 without experts, and do not
document the order of gate and up."""


def trans_quant_param(scale: Tensor) -> Tensor:
    """Encode float32 scales as the int64 that dequantises integer matmuls.

    Takes any shape; keeps only 10 bits of the mantissa.
    """
    out: Tensor = torch.ops.npu.npu_trans_quant_param(scale.float().flatten()).view(scale.shape)
    return out


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
    """Compute ``act((x @ matrix + bias) * scale * per_token_scale)`` of int8 operands, [T, N].

    Args:
        scale_XN: bfloat16 or float32 for an output of bfloat16 or float16, encoded int64 for int8.
        per_group: Whether the list holds the rows of each group instead of cumulative rows.
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
    out: Tensor = y
    return out


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
    """Compute ``x @ ((matrix + offset) * scale) + bias`` of int8 matrices, [T, N]."""
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
    out: Tensor = y
    return out


def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    experts: Sequence[int] | None,
    **options: Any,
) -> Tensor:
    """Compute ``act(x @ weight1 + bias1) @ weight2 + bias2``; the scales select the quantisation.

    Args:
        experts: Rows of each expert.
        options: By the operator's names: bias1 and bias2; scale, offset, deq_scale1 and deq_scale2
            (and output_dtype) for int8 operands; antiquant_scale1 ... for int8 weights.
    """
    tokens = None if experts is None else list(experts)
    out: Tensor = torch.ops.npu.npu_ffn(
        x, weight1, weight2, activation, expert_tokens=tokens, **options
    )
    return out
