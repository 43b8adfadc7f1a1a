"""Two attentions over different keys joined by the statistics of their softmax.

``log_sum_exp.merge`` is the same on one number a query; this is the form whose statistics are a
largest score and a sum of exponentials, as the NPU's fused attention answers them.

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
    """The joined attention."""

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
    """Attention over the keys of both, which do not overlap. No backward.

    Args:
        prev_out: [S, B, N * D] with layout SBH, [T, N, D] with layout TND; cur_out alike.
        prev_max: Largest score of each query, repeated along the last axis: [B, N, S, 8], or
            [T, N, 8]; float32 (float64). The others alike. -inf and a sum of 0 for a query that
            saw no key, whose row of the output is zeros.
        layout: Of out and statistics.
        starts: Where each sequence begins and the last ends, from 0, int64; the NPU's operator
            wants it with layout TND. The result does not depend on it.

    Numerics: in the dtype of the statistics, rounded once to that of ``prev_out``.

    Raises:
        RuntimeError: A gradient is asked for; attention's own backward takes the joined statistics.
    """
    refuse_gradient("ring_attention_update", prev_out, cur_out, prev_max, cur_max)
    largest = torch.maximum(prev_max, cur_max)
    # A query that saw no key on either side has no largest score to measure from.
    origin = largest.masked_fill(largest == -torch.inf, 0.0)
    prev_part = prev_sum * (prev_max - origin).exp()
    cur_part = cur_sum * (cur_max - origin).exp()
    total = prev_part + cur_part
    # Their shares of the output; of a sum of nothing there are none.
    inverse = total.reciprocal().masked_fill(total == 0, 0.0)
    prev_share, cur_share = (
        _as_factor(part * inverse, prev_out, layout) for part in (prev_part, cur_part)
    )
    out = prev_out * prev_share + cur_out * cur_share
    return Merged(out.to(prev_out.dtype), largest, total)


def _as_factor(share: Tensor, out: Tensor, layout: str) -> Tensor:
    """One number a query and head, in the shape of the output's rows."""
    first = share[..., 0]
    if layout == "TND":
        return first.unsqueeze(-1)
    heads = first.shape[1]
    per_head = first.permute(2, 0, 1).unsqueeze(-1)  # [S, B, N, 1]
    return per_head.expand(*per_head.shape[:3], out.shape[-1] // heads).flatten(2)
