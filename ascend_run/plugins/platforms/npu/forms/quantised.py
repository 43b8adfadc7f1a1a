"""Quantised matmuls and MLPs by fused operators, for inference."""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ascend_run.ops.elementwise.activations import GATED
from ascend_run.ops.experts import feed_forward as torch_form
from ascend_run.ops.experts.feed_forward import expert_sizes
from ascend_run.ops.experts.group_lists import GroupList
from ascend_run.ops.experts.quantised_matmul import check_int8_output
from ascend_run.ops.kernels.forward_only import refuse_gradient
from ascend_run.plugin_api import PlatformError
from ascend_run.plugins.platforms.npu.operators import quantised as operators

from .groups import on_device

OUTPUTS: Final = (torch.float16, torch.bfloat16, torch.int8)


def quant_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    scale_XN: Tensor,
    group_list: GroupList,
    *,
    cumulative: bool,
    per_token_scale_T: Tensor | None = None,
    bias_XN: Tensor | None = None,
    activation: str | None = None,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Implement ``ops.experts.quantised_matmul.quant_grouped_matmul``.

    The output is float16, bfloat16 or int8. Numerics: the scale is rounded to bfloat16 for a
    bfloat16 output, and keeps only 10 bits of its mantissa for int8.

    Raises:
        PlatformError: Another output dtype.
    """
    refuse_gradient("quant_grouped_matmul", scale_XN, per_token_scale_T)
    _refuse_output("quant_grouped_matmul", output_dtype, OUTPUTS)
    is_int8 = output_dtype is torch.int8
    check_int8_output(output_dtype, per_token_scale_T, activation)
    if activation is not None and per_token_scale_T is None:  # the operator needs a per-token scale
        per_token_scale_T = torch.ones(x_TK.shape[0], device=x_TK.device)
    return operators.quant_grouped_matmul(
        x_TK.contiguous(),
        matrices_XKN,
        operators.trans_quant_param(scale_XN) if is_int8 else _scale(scale_XN, output_dtype),
        on_device(group_list, cumulative, x_TK),
        per_group=not cumulative,
        per_token_scale_T=per_token_scale_T,
        bias_XN=bias_XN,
        activation=activation,
        output_dtype=None if is_int8 else output_dtype,
    )


def weight_quant_grouped_matmul(
    x_TK: Tensor,
    matrices_XKN: Tensor,
    antiquant_scale_XN: Tensor,
    antiquant_offset_XN: Tensor | None,
    group_list: GroupList,
    *,
    cumulative: bool,
    bias_XN: Tensor | None = None,
) -> Tensor:
    """Implement ``ops.experts.quantised_matmul.weight_quant_grouped_matmul``.

    The operator always needs an offset.
    """
    refuse_gradient("weight_quant_grouped_matmul", x_TK, antiquant_scale_XN, bias_XN)
    offset = antiquant_offset_XN
    return operators.weight_quant_grouped_matmul(
        x_TK.contiguous(),
        matrices_XKN,
        antiquant_scale_XN,
        torch.zeros_like(antiquant_scale_XN) if offset is None else offset,
        on_device(group_list, cumulative, x_TK),
        per_group=not cumulative,
        bias_XN=bias_XN,
    )


def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
) -> Tensor:
    """Implement ``ops.experts.feed_forward.ffn``; torch computes gated activations."""
    refuse_gradient("ffn", x, weight1, weight2, bias1, bias2)
    if activation in GATED:
        return torch_form.ffn(
            x,
            weight1,
            weight2,
            activation,
            bias1=bias1,
            bias2=bias2,
            experts=experts,
            cumulative=cumulative,
        )
    _refuse_activation("ffn", activation)
    sizes = expert_sizes(experts, cumulative, x)
    return operators.ffn(x, weight1, weight2, activation, sizes, bias1=bias1, bias2=bias2)


def quantised_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    scale: Tensor,
    offset: Tensor,
    deq_scale1: Tensor,
    deq_scale2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Implement ``ops.experts.feed_forward.quantised_ffn``.

    The output is float16 or bfloat16. Numerics: the dequantisation scales are rounded to bfloat16
    for a bfloat16 output, and keep only 10 bits of their mantissa for float16.

    Raises:
        PlatformError: Another output dtype, or a gated activation.
    """
    refuse_gradient("quantised_ffn", scale, offset, deq_scale1, deq_scale2)
    _refuse_output("quantised_ffn", output_dtype, OUTPUTS[:2])
    _refuse_activation("quantised_ffn", activation)
    is_half = output_dtype is torch.float16
    encode = operators.trans_quant_param if is_half else (lambda s: s.to(torch.bfloat16))
    return operators.ffn(
        x,
        weight1,
        weight2,
        activation,
        expert_sizes(experts, cumulative, x),
        bias1=bias1,
        bias2=bias2,
        scale=scale.float(),
        offset=offset.float(),
        deq_scale1=encode(deq_scale1),
        deq_scale2=encode(deq_scale2),
        output_dtype=output_dtype,
    )


def weight_quantised_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    antiquant_scale1: Tensor,
    antiquant_scale2: Tensor,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    experts: Sequence[int] | None = None,
    cumulative: bool = False,
) -> Tensor:
    """Implement ``ops.experts.feed_forward.weight_quantised_ffn``.

    Raises:
        PlatformError: A gated activation.
    """
    refuse_gradient("weight_quantised_ffn", x, antiquant_scale1, antiquant_scale2, bias1, bias2)
    _refuse_activation("weight_quantised_ffn", activation)
    return operators.ffn(
        x,
        weight1,
        weight2,
        activation,
        expert_sizes(experts, cumulative, x),
        bias1=bias1,
        bias2=bias2,
        antiquant_scale1=antiquant_scale1,
        antiquant_scale2=antiquant_scale2,
        antiquant_offset1=_or_zeros(antiquant_offset1, antiquant_scale1),
        antiquant_offset2=_or_zeros(antiquant_offset2, antiquant_scale2),
    )


def _scale(scale: Tensor, output_dtype: torch.dtype) -> Tensor:
    return scale.to(torch.bfloat16 if output_dtype is torch.bfloat16 else torch.float32)


def _or_zeros(offset: Tensor | None, scale: Tensor) -> Tensor:
    return torch.zeros_like(scale) if offset is None else offset


def _refuse_output(name: str, dtype: torch.dtype, expected: Sequence[torch.dtype]) -> None:
    if dtype not in expected:
        names = ", ".join(str(d).removeprefix("torch.") for d in expected)
        raise PlatformError(f"platform npu: {name} has no output dtype {dtype}; use {names}")


def _refuse_activation(name: str, activation: str) -> None:
    if activation not in operators.FFN_ACTIVATIONS:
        names = ", ".join(operators.FFN_ACTIVATIONS)
        raise PlatformError(f"platform npu: {name} has no activation {activation!r}; use {names}")
