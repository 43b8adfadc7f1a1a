"""Quantised grouped GEMMs: int8 by int8, and floating-point rows by int8 matrices.

For inference: no backward. int8 matmuls run in float64, which holds their sums exactly (up to 2**39
terms), so that only the result is rounded.

Source: MindSpeed's operator documentation, quant_gmm and weight_quant_gmm; torch_npu's
documentation of npu_grouped_matmul.
"""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.ops.elementwise.activations import activate
from ascend_run.ops.kernels.forward_only import refuse_gradient

from .group_lists import GroupList, group_sizes


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
    """Compute ``act((x @ matrix + bias) * scale * per_token_scale)`` by each row's group, [T, N].

    Args:
        x_TK: int8, as are the matrices, which may be transposed views.
        scale_XN: Dequantisation scale; floating. Multiplied by each row's own scale.
        bias_XN: int32, added to the integer result.
        activation: relu, gelu_tanh, fastgelu or silu.
        output_dtype: int8 rounds to nearest (ties to even) and saturates; it excludes per-token
            scale and activation.

    Raises:
        ValueError: If the output is int8 with a per-token scale or an activation.
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("quant_grouped_matmul", scale_XN, per_token_scale_T)
    check_int8_output(output_dtype, per_token_scale_T, activation)
    sizes = group_sizes(group_list, cumulative, x_TK.shape[0])
    y = products(x_TK.double(), matrices_XKN.double(), sizes)
    if bias_XN is not None:
        y += spread(bias_XN, sizes)
    y *= spread(scale_XN, sizes)
    if per_token_scale_T is not None:
        y *= per_token_scale_T.unsqueeze(-1)
    if activation is not None:
        y = activate(y, activation)
    return to_int8(y) if output_dtype is torch.int8 else y.to(output_dtype)


def check_int8_output(
    output_dtype: torch.dtype, per_token_scale_T: Tensor | None, activation: str | None
) -> None:
    """Check that an int8 output has neither a per-token scale nor an activation.

    Raises:
        ValueError: If it has.
    """
    if output_dtype is torch.int8 and (activation or per_token_scale_T is not None):
        raise ValueError(
            "quant_grouped_matmul: an int8 output supports no per-token scale and no activation; "
            "use a floating output_dtype, or remove them"
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
    """Compute ``x @ ((matrix + offset) * scale) + bias`` by each row's group, [T, N] in x's dtype.

    Args:
        x_TK: float16, bfloat16 or wider.
        matrices_XKN: int8; may be a transposed view.

    Numerics: matmuls in float32 (float64 for float64).

    Raises:
        RuntimeError: If a gradient is required.
    """
    refuse_gradient("weight_quant_grouped_matmul", x_TK, antiquant_scale_XN, bias_XN)
    sizes = group_sizes(group_list, cumulative, x_TK.shape[0])
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    matrices = antiquantised(matrices_XKN, antiquant_scale_XN, antiquant_offset_XN, wide)
    y = products(x_TK.to(wide), matrices, sizes)
    if bias_XN is not None:
        y += spread(bias_XN, sizes)
    return y.to(x_TK.dtype)


def antiquantised(
    matrices: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype, group_size: int = 0
) -> Tensor:
    """Compute ``(matrices + offset) * scale``.

    Args:
        matrices: [..., K, N].
        scale: One number, [..., N], or [ceil(K / group_size), N] with a group size: one scale for
            so many rows. The offset alike.
    """
    rows = matrices.shape[-2]

    def spread_rows(x: Tensor) -> Tensor:
        if group_size:
            return x.to(dtype).repeat_interleave(group_size, dim=-2)[..., :rows, :]
        return x.to(dtype).unsqueeze(-2)

    wide = matrices.to(dtype)
    if offset is not None:
        wide = wide + spread_rows(offset)
    return wide * spread_rows(scale)


def products(x_TK: Tensor, matrices_XKN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply each row by the matrix of its group; returns [T, N]."""
    parts = zip(x_TK.split(list(sizes)), matrices_XKN.unbind(0), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def spread(per_group: Tensor, sizes: Sequence[int]) -> Tensor:
    """Repeat each group's entry for each of its rows: [X, ...] -> [T, ...]."""
    repeats = torch.tensor(sizes, device=per_group.device)
    return per_group.repeat_interleave(repeats, dim=0, output_size=sum(sizes))


def to_int8(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, and saturate."""
    return x.round().clamp(-128, 127).to(torch.int8)
