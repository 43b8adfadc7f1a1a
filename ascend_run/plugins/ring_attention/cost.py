"""What the ring costs. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.kv_cache import KvCacheOptions
from ascend_run.ops.attention.ring_attention.volume import Ring
from ascend_run.plugin_api import CostChange, KeptChange, KeptTensor, Layout, Messages, RankKind


def ring_cost(layout: Layout, rank: RankKind, options: KvCacheOptions) -> CostChange:
    """Keys and values go round in forward and again in backward, their gradients in float32.

    What is kept of them here does not go round again. A window may stop the ring early; this is
    the whole ring.
    """
    ring = Ring(
        tokens=rank.tokens,
        groups=rank.query_groups,
        width=rank.head_width,
        item_bytes=rank.item_bytes,
        size=layout.cp,
        window=layout.cp,
    )
    keeping = options.caching(rank.layers)
    hops, _ = ring.hops
    plain = (len(rank.layers) - len(keeping)) * rank.num_micro_batches
    counted = [
        (runs, sends)
        for runs, kept in (
            (plain, "none"),
            (len(keeping) * rank.num_micro_batches, options.kv_cache),
        )
        for sends in ring.sends(hops, kept)
        if runs
    ]
    received = KeptTensor(
        part="self_attention", name="received", nbytes=ring.held_bytes(options.kv_cache)
    )
    own = ("self_attention.k", "self_attention.v")
    return CostChange(
        kept=(KeptChange(tensors=own, layers=keeping, factor=0.0),) if keeping else (),
        kept_added=(received,) if keeping else (),
        kept_added_layers=keeping,
        messages=tuple(
            Messages(
                operation="send",
                group="cp",
                calls=runs * sends.calls,
                sent_bytes=runs * sends.calls * sends.nbytes,
                why=sends.why,
                hidden=True,
            )
            for runs, sends in counted
        ),
    )
