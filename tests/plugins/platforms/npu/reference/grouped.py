"""Grouped GEMMs, as documented."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .quantised import decoded

ACTIVATIONS = {
    0: lambda z: z,
    1: lambda z: z.clamp(min=0),
    2: lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    4: lambda z: z / (1 + torch.exp(-1.702 * z)),
    5: lambda z: z / (1 + torch.exp(-z)),
}


def ranges_of(group_list: Tensor, group_list_type: int) -> list[tuple[int, int]]:
    """Return the row ranges: type 0 has cumulative sums; 1 the rows of each group."""
    assert group_list.dtype == torch.int64
    entries = group_list.tolist()
    assert group_list_type in (0, 1)
    ends = entries
    if group_list_type == 1:
        assert min(entries) >= 0
        ends = [sum(entries[: i + 1]) for i in range(len(entries))]
    pairs = list(zip([0, *ends[:-1]], ends, strict=True))
    assert all(a <= b for a, b in pairs), "running totals never fall"
    return pairs


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: int | None = None,
    **options: Any,
) -> list[Tensor]:
    assert not any(value for value in options.values() if value is not None)
    if group_type == -1:
        assert group_list is None
        assert split_item in (0, 1)
        assert not any((bias, scale, antiquant_scale, per_token_scale, act_type))
        return [a @ b for a, b in zip(x, weight, strict=True)]
    (left,), (right,) = x, weight
    assert split_item in (2, 3), "one tensor comes out"
    assert group_list is not None
    ranges = ranges_of(group_list, group_list_type)
    assert ranges[-1][1] > 0, "there is something to multiply"
    if group_type == 0:
        assert ranges[-1][1] == left.shape[0]
        quantities = (bias, scale, antiquant_scale, antiquant_offset, per_token_scale)
        b, s, a_s, a_o, p = (None if q is None else q[0] for q in quantities)
        if s is None and a_s is None:
            assert (b, p, act_type, output_dtype) == (None, None, 0, None)
            return [torch.cat([left[i:j] @ right[g] for g, (i, j) in enumerate(ranges)])]
        return [_quantised(left, right, ranges, b, s, a_s, a_o, p, act_type, output_dtype)]
    assert group_type == 2
    assert left.stride(0) == 1, "a transposed view"
    products = [left[:, a:b] @ right[a:b] for a, b in ranges]
    # The result of an empty group is not documented.
    empty = [a == b for a, b in ranges]
    return [
        torch.stack([p.fill_(torch.nan) if e else p for p, e in zip(products, empty, strict=True)])
    ]


def _quantised(
    left: Tensor,
    right: Tensor,
    ranges: list[tuple[int, int]],
    bias: Tensor | None,
    scale: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    per_token_scale: Tensor | None,
    act_type: int,
    output_dtype: int | None,
) -> Tensor:
    """Compute by the formulas of int8 operands, or of int8 matrices alone."""
    assert right.dtype is torch.int8
    dtype = left.dtype
    if scale is not None:
        assert left.dtype is torch.int8
        assert bias is None or bias.dtype is torch.int32
        assert act_type == 0 or per_token_scale is not None, "only beside per-token scales"
        kinds = {None: torch.int64, 5: torch.float32, 15: torch.bfloat16}
        assert scale.dtype is kinds[output_dtype]
        dtype = {None: torch.int8, 5: torch.float16, 15: torch.bfloat16}[output_dtype]
    else:
        assert antiquant_offset is not None, "none is not taken yet"
        assert (act_type, output_dtype, per_token_scale) == (0, None, None)
    parts = []
    for group, (start, end) in enumerate(ranges):
        matrix = right[group].double()
        if antiquant_scale is not None:
            matrix = (matrix + antiquant_offset[group].double()) * antiquant_scale[group].double()
        y = left[start:end].double() @ matrix
        if bias is not None:
            y = y + bias[group]
        if scale is not None:
            y = y * decoded(scale[group])
        if per_token_scale is not None:
            y = y * per_token_scale[start:end, None].double()
        parts.append(ACTIVATIONS[act_type](y))
    y = torch.cat(parts)
    return y.round().clamp(-128, 127).to(dtype) if dtype is torch.int8 else y.to(dtype)


def npu_grouped_matmul_add_(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int = 0,
) -> Tensor:
    assert transpose_x
    assert not transpose_weight
    assert (group_type, group_list_type) == (2, 0)
    assert input.dtype is torch.float32
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.bfloat16, torch.float16)
    for group, (start, end) in enumerate(ranges_of(group_list, 0)):
        input[group] += x[start:end].float().t() @ weight[start:end].float()
    return input
