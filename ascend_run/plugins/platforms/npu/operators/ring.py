"""Merge of two attention results."""

from __future__ import annotations

import torch
from torch import Tensor


def ring_attention_update(
    prev: tuple[Tensor, Tensor, Tensor],
    cur: tuple[Tensor, Tensor, Tensor],
    layout: str,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge two triples of (output, maximum score, sum of exponentials).

    Args:
        layout: SBH, with statistics [B, N, S, 8]; or TND, with statistics [T, N, 8].
        starts: With TND, cumulative lengths of the sequences from 0, int64.
    """
    packed = {"actual_seq_qlen": starts, "input_softmax_layout": "TND"} if layout == "TND" else {}
    out, largest, total = torch.ops.npu.npu_ring_attention_update(
        *prev, *cur, input_layout=layout, **packed
    )
    return out, largest, total
