"""Merging two attentions, as documented."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    for one, other in (
        (prev_attn_out, cur_attn_out),
        (prev_softmax_max, cur_softmax_max),
        (prev_softmax_sum, cur_softmax_sum),
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.is_contiguous()
        assert other.is_contiguous()
    for statistic in (prev_softmax_max, cur_softmax_max, prev_softmax_sum, cur_softmax_sum):
        assert bool(statistic.isfinite().all()), "what is made of infinities is not documented"
    assert prev_softmax_max.shape[-1] == 8
    largest = torch.maximum(prev_softmax_max, cur_softmax_max)
    prev = prev_softmax_sum * torch.exp(prev_softmax_max - largest)
    cur = cur_softmax_sum * torch.exp(cur_softmax_max - largest)
    total = prev + cur
    prev_share, cur_share = prev / total, cur / total
    if input_layout == "TND":
        assert input_softmax_layout == "TND"
        assert actual_seq_qlen is not None, "wanted with TND"
        assert actual_seq_qlen[0] == 0
        assert actual_seq_qlen[-1] == len(prev_attn_out)
        assert largest.shape[:2] == prev_attn_out.shape[:2]
        shares = [share[..., :1] for share in (prev_share, cur_share)]
    else:
        assert input_layout == "SBH"
        assert input_softmax_layout == ""
        length, batch, width = prev_attn_out.shape
        heads = largest.shape[1]
        assert largest.shape == (batch, heads, length, 8)
        spread = (
            share[..., :1].expand(-1, -1, -1, width // heads) for share in (prev_share, cur_share)
        )
        shares = [s.permute(2, 0, 1, 3).reshape(length, batch, width) for s in spread]
    out = prev_attn_out * shares[0] + cur_attn_out * shares[1]
    return out.to(prev_attn_out.dtype), largest, total
