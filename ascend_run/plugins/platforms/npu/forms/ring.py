"""Merge two attention results with one operator."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ascend_run.ops.attention.ring_update import Merged
from ascend_run.ops.kernels.forward_only import refuse_gradient
from ascend_run.plugins.platforms.npu.operators import ring as operators


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
    """Implement ``ops.attention.ring_update.ring_attention_update``.

    What the operator returns for -inf, the score of a query without keys on one side, is not
    documented; so -inf is replaced by a large negative score, and restored afterwards.
    """
    refuse_gradient("ring_attention_update", prev_out, cur_out, prev_max, cur_max)
    if layout == "TND" and starts is None:
        starts = torch.tensor([0, prev_out.shape[0]], device=prev_out.device)
    lowest = torch.finfo(prev_max.dtype).min / 2
    prev = prev_out.contiguous(), prev_max.clamp(min=lowest), prev_sum.contiguous()
    cur = cur_out.contiguous(), cur_max.clamp(min=lowest), cur_sum.contiguous()
    # Without keys on either side the merge is 0 / 0; a sum of 1 avoids it.
    nothing = (prev_sum == 0) & (cur_sum == 0)
    ones = torch.ones_like(prev_sum)
    prev = (*prev[:2], torch.where(nothing, ones, prev[2]))
    out, largest, total = operators.ring_attention_update(prev, cur, layout, starts)
    return Merged(out, largest.masked_fill(nothing, -torch.inf), total.masked_fill(nothing, 0.0))
