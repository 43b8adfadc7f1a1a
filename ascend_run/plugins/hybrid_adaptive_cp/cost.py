"""What the exchange of heads and that of keys cost together. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_run.ops.attention.adaptive.rounds import exchange_rounds
from ascend_run.ops.attention.adaptive.volume import AdaptiveVolume
from ascend_run.ops.attention.exchange_volume import ExchangeVolume
from ascend_run.ops.attention.head_shares import head_shares
from ascend_run.plugin_api import (
    CostChange,
    KeptChange,
    Layout,
    Mask,
    Messages,
    RankKind,
    RunConfig,
)

from .groups import HEADS, KEYS

if TYPE_CHECKING:
    from . import HybridAdaptiveCpConfig


def hybrid_adaptive_cost(
    config: RunConfig, layout: Layout, rank: RankKind, options: HybridAdaptiveCpConfig
) -> CostChange:
    """Two messages each way among the neighbours; between their groups the keys of all their
    positions, and of the heads that one of them has of all."""
    degree = options.ulysses_degree
    volume = ExchangeVolume(
        shares=head_shares(rank.heads, rank.query_groups, degree),
        rank=0,
        held=rank.tokens,
        whole=rank.tokens * degree,
        row_bytes=rank.head_width * rank.item_bytes,
        value_bytes=rank.value_width * rank.item_bytes,
    )
    own = ("self_attention.k", "self_attention.v")
    times = degree * volume.share.num_groups / rank.query_groups
    return CostChange(
        kept=(KeptChange(tensors=own, factor=times),) if times != 1 else (),
        messages=(
            *_heads(layout, rank, degree, volume),
            *_keys(config, layout, rank, options, sum(volume.share.copies)),
        ),
    )


def _heads(
    layout: Layout, rank: RankKind, degree: int, volume: ExchangeVolume
) -> Iterator[Messages]:
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


def _keys(
    config: RunConfig,
    layout: Layout,
    rank: RankKind,
    options: HybridAdaptiveCpConfig,
    groups: int,
) -> Iterator[Messages]:
    """Of the rank that sends most."""
    window, length = config.model.get("window_size"), config.data.seq_length
    size = layout.cp // options.ulysses_degree
    rounds = exchange_rounds(Mask(window=window), options.sharing(window), length, length, size)
    volumes = (
        AdaptiveVolume(
            rounds=rounds,
            rank=place,
            key_bytes=config.train.micro_batch_size * groups * 2 * rank.head_width * item_bytes,
            item_bytes=item_bytes,
        )
        for item_bytes in (rank.item_bytes,)
        for place in range(size)
    )
    for sends in max(volumes, key=lambda volume: volume.nbytes).sends():
        yield Messages(
            operation="send",
            group=KEYS,
            calls=rank.layer_passes * sends.calls,
            sent_bytes=rank.layer_passes * sends.calls * sends.nbytes,
            why=sends.why,
            hidden=True,
            group_size=size,
            group_stride=layout.tp * options.ulysses_degree,
        )
