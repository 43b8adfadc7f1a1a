"""What the exchange and the ring cost together. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_run.ops.attention.exchange_volume import ExchangeVolume
from ascend_run.ops.attention.head_shares import head_shares
from ascend_run.ops.attention.ring_attention.volume import Ring
from ascend_run.plugin_api import CostChange, KeptChange, KeptTensor, Layout, Messages, RankKind

from .groups import HEADS, WINDOW, WINDOWS

if TYPE_CHECKING:
    from . import HybridCpConfig


def hybrid_cost(layout: Layout, rank: RankKind, options: HybridCpConfig) -> CostChange:
    """Two messages each way among the neighbours; the ring's of all their positions, and of the
    heads that one of them has of all."""
    degree = options.ulysses_degree
    volume = ExchangeVolume(
        shares=head_shares(rank.heads, rank.query_groups, degree),
        rank=0,
        held=rank.tokens,
        whole=rank.tokens * degree,
        row_bytes=rank.head_width * rank.item_bytes,
        value_bytes=rank.value_width * rank.item_bytes,
    )
    size = layout.cp // degree
    ring = Ring(
        tokens=rank.tokens * degree,
        groups=sum(volume.share.copies),  # which are made before the ring
        width=rank.head_width,
        item_bytes=rank.item_bytes,
        size=size,
        window=options.window or size,
    )
    keeping = options.caching(rank.layers)
    others = tuple(i for i in rank.layers if i not in keeping)
    own = ("self_attention.k", "self_attention.v")
    times = degree * volume.share.num_groups / rank.query_groups
    changes = (
        KeptChange(tensors=own, layers=keeping, factor=0.0),
        KeptChange(tensors=own, layers=others, factor=times),
    )
    received = KeptTensor(
        part="self_attention", name="received", nbytes=ring.held_bytes(options.kv_cache)
    )
    return CostChange(
        kept=tuple(c for c in changes if c.layers and c.factor != 1),
        kept_added=(received,) if keeping else (),
        kept_added_layers=keeping,
        messages=(
            *_exchange(layout, rank, degree, volume),
            *_round(layout, rank, ring, options, len(keeping)),
        ),
    )


def _exchange(
    layout: Layout, rank: RankKind, degree: int, volume: ExchangeVolume
) -> Iterator[Messages]:
    """The ring keeps what it needs of keys and values; none comes again among the neighbours."""
    for nbytes, direction in ((volume.forward(), "forward"), (volume.backward("full"), "backward")):
        yield Messages(
            operation="all_to_all",
            group=HEADS,
            calls=2 * rank.layer_passes,
            sent_bytes=rank.layer_passes * nbytes,
            why=f"heads for sequence, {direction}",
            group_size=degree,
            group_stride=layout.tp,
        )


def _round(
    layout: Layout, rank: RankKind, ring: Ring, options: HybridCpConfig, num_keeping: int
) -> Iterator[Messages]:
    inside, across = ring.hops
    apart = layout.tp * options.ulysses_degree
    runs = (
        ((len(rank.layers) - num_keeping) * rank.num_micro_batches, "none"),
        (num_keeping * rank.num_micro_batches, options.kv_cache),
    )
    for group, hops, size, stride in (
        (WINDOW, inside, ring.window, apart),
        (WINDOWS, across, ring.size // ring.window, apart * ring.window),
    ):
        for times, kept in runs:
            for sends in ring.sends(hops, kept):
                if times and hops:
                    yield Messages(
                        operation="send",
                        group=group,
                        calls=times * sends.calls,
                        sent_bytes=times * sends.calls * sends.nbytes,
                        why=sends.why,
                        hidden=True,
                        group_size=size,
                        group_stride=stride,
                    )
