"""What the exchange costs the rank that sends most. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.attention.adaptive.rounds import exchange_rounds
from ascend_run.ops.attention.adaptive.volume import AdaptiveVolume
from ascend_run.plugin_api import CostChange, Layout, Mask, Messages, RankKind, RunConfig

if TYPE_CHECKING:
    from . import AdaptiveCpConfig


def adaptive_cost(
    config: RunConfig, layout: Layout, rank: RankKind, options: AdaptiveCpConfig
) -> CostChange:
    """Of one document: where a batch has several, less travels."""
    window, length = config.model.get("window_size"), config.data.seq_length
    rounds = exchange_rounds(
        Mask(window=window), options.sharing(window), length, length, layout.cp
    )
    positions = config.train.micro_batch_size * rank.query_groups
    volumes = (
        AdaptiveVolume(
            rounds=rounds,
            rank=place,
            key_bytes=positions * 2 * rank.head_width * rank.item_bytes,
            item_bytes=rank.item_bytes,
        )
        for place in range(layout.cp)
    )
    most = max(volumes, key=lambda volume: volume.nbytes)
    return CostChange(
        messages=tuple(
            Messages(
                operation="send",
                group="cp",
                calls=rank.layer_passes * sends.calls,
                sent_bytes=rank.layer_passes * sends.calls * sends.nbytes,
                why=sends.why,
                hidden=True,
            )
            for sends in most.sends()
        )
    )
