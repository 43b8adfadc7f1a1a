"""Merges two attention outputs over disjoint keys by their softmax statistics.

``log_sum_exp.merge_into`` does the same with one number a query; this variant takes the row maximum
and the sum of exponentials, which the NPU's fused attention returns.

Source: MindSpeed's operator documentation, npu_ring_attention_update; online softmax of
arXiv:1805.02867.
"""

# S queries, B batch, N heads, D head width, T packed tokens

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ascend_run.ops.kernels.forward_only import refuse_gradient


class Merged(NamedTuple):
    """The merged attention."""

    out: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor


def ring_attention_update(
    prev_out: Tensor,
    prev_max: Tensor,
    prev_sum: Tensor,
    cur_out: Tensor,
    cur_max: Tensor,
    cur_sum: Tensor,
    *,
    layout: Literal["SBH", "TND"] = "SBH",
    starts: Tensor | None = None,
) -> Merged:
    """Merge two attention outputs over disjoint keys. Has no backward.

    Args:
        prev_out: [S, B, N * D] with layout SBH, [T, N, D] with layout TND; cur_out alike.
        prev_max: Largest score of each query, repeated along the last dim: [B, N, S, 8], or [T, N,
            8]; float32 (float64). The other statistics alike. A query that saw no key has -inf, a
            sum of 0, and an output of zeros.
        layout: Of out and statistics.
        starts: Offset of each sequence and the end of the last, from 0, int64; the NPU's operator
            requires it with layout TND. The result does not depend on it.

    Numerics: computed in the statistics' dtype, rounded once to that of ``prev_out``.

    Raises:
        RuntimeError: If a gradient is required; attention's own backward takes the merged
            statistics.
    """
    refuse_gradient("ring_attention_update", prev_out, cur_out, prev_max, cur_max)
    largest = torch.maximum(prev_max, cur_max)
    # A query that saw no key on either side has no finite maximum to subtract.
    origin = largest.masked_fill(largest == -torch.inf, 0.0)
    prev_part = prev_sum * (prev_max - origin).exp()
    cur_part = cur_sum * (cur_max - origin).exp()
    total = prev_part + cur_part
    # Weights of the two outputs; both are 0 if the total is 0.
    inverse = total.reciprocal().masked_fill(total == 0, 0.0)
    prev_share, cur_share = (
        _as_factor(part * inverse, prev_out, layout) for part in (prev_part, cur_part)
    )
    out = prev_out * prev_share + cur_out * cur_share
    return Merged(out.to(prev_out.dtype), largest, total)


def _as_factor(share: Tensor, out: Tensor, layout: str) -> Tensor:
    """Expand one number a query and head to the shape of the output's rows."""
    first = share[..., 0]
    if layout == "TND":
        return first.unsqueeze(-1)
    heads = first.shape[1]
    per_head = first.permute(2, 0, 1).unsqueeze(-1)  # [S, B, N, 1]
    return per_head.expand(*per_head.shape[:3], out.shape[-1] // heads).flatten(2)
