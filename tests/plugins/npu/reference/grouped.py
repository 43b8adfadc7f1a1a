"""Products of groups of rows, as documented."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **options: Any,
) -> list[Tensor]:
    (left,), (right,) = x, weight
    assert split_item in (2, 3), "one tensor comes out"
    assert group_list_type == 0, "running totals"
    assert group_list.dtype == torch.int64
    assert not any(value for value in options.values() if value is not None)
    ends = group_list.tolist()
    assert ends[-1] > 0, "there is something to multiply"
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    if group_type == 0:
        assert ends[-1] == left.shape[0]
        return [torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(ranges)])]
    assert group_type == 2
    assert left.stride(0) == 1, "a transposed view"
    products = [left[:, a:b] @ right[a:b] for a, b in ranges]
    # What stands in the place of an empty group is not documented.
    empty = [a == b for a, b in ranges]
    return [
        torch.stack([p.fill_(torch.nan) if e else p for p, e in zip(products, empty, strict=True)])
    ]
