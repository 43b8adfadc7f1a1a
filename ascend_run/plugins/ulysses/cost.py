"""What the exchange costs. No torch."""

from __future__ import annotations

import math

from ascend_run.plugin_api import CostChange, KeptChange, Layout, Messages, RankKind

_LSE_BYTES = 4


def exchange_cost(layout: Layout, rank: RankKind) -> CostChange:
    """Two messages each way, and key-value heads as often as the ranks need them.

    What the kernel keeps it keeps of the whole sequence and fewer heads: as many bytes, but for the
    repeated heads.
    """
    repeat = math.lcm(rank.query_groups, layout.cp) // rank.query_groups
    item = rank.tokens * rank.head_width * rank.item_bytes
    query, keys = rank.heads * item, 2 * rank.query_groups * repeat * item
    lse = rank.tokens * rank.heads * _LSE_BYTES
    passes = rank.layer_passes

    def messages(sent_bytes: float, direction: str) -> Messages:
        return Messages(
            operation="all_to_all",
            group="cp",
            calls=2 * passes,
            sent_bytes=passes * sent_bytes,
            why=f"heads for sequence, {direction}",
        )

    kept = KeptChange(tensors=("self_attention.k", "self_attention.v"), factor=repeat)
    return CostChange(
        kept=(kept,) if repeat > 1 else (),
        messages=(
            messages(2 * query + keys + lse, "forward"),
            messages(2 * query + keys, "backward"),
        ),
    )
