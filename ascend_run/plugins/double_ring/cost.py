"""What the double ring costs. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.attention.ring_attention.volume import Ring
from ascend_run.plugin_api import CostChange, KeptChange, KeptTensor, Layout, Messages, RankKind

from .groups import WINDOW, WINDOWS

if TYPE_CHECKING:
    from . import DoubleRingConfig


def double_ring_cost(layout: Layout, rank: RankKind, options: DoubleRingConfig) -> CostChange:
    """The plain ring's messages, told apart by whether they stay in a window."""
    ring = Ring(
        tokens=rank.tokens,
        groups=rank.query_groups,
        width=rank.head_width,
        item_bytes=rank.item_bytes,
        size=layout.cp,
        window=options.window,
    )
    keeping = options.caching(rank.layers)
    received = KeptTensor(
        part="self_attention", name="received", nbytes=ring.held_bytes(options.kv_cache)
    )
    inside, across = ring.hops
    links = (
        (WINDOW, inside, options.window, layout.tp),
        (WINDOWS, across, layout.cp // options.window, layout.tp * options.window),
    )
    runs = (
        ((len(rank.layers) - len(keeping)) * rank.num_micro_batches, "none"),
        (len(keeping) * rank.num_micro_batches, options.kv_cache),
    )
    return CostChange(
        kept=(
            KeptChange(
                tensors=("self_attention.k", "self_attention.v"), layers=keeping, factor=0.0
            ),
        )
        if keeping
        else (),
        kept_added=(received,) if keeping else (),
        kept_added_layers=keeping,
        messages=tuple(
            Messages(
                operation="send",
                group=group,
                calls=times * sends.calls,
                sent_bytes=times * sends.calls * sends.nbytes,
                why=sends.why,
                hidden=True,
                group_size=size,
                group_stride=stride,
            )
            for group, hops, size, stride in links
            for times, kept in runs
            for sends in ring.sends(hops, kept)
            if times and hops
        ),
    )
