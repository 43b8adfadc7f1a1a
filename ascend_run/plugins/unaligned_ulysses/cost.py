"""What the exchange costs the rank that sends most. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.attention.exchange_volume import ExchangeVolume
from ascend_run.ops.attention.head_shares import head_shares
from ascend_run.plugin_api import CostChange, KeptChange, Layout, Messages, RankKind, RunConfig

from .partition import UnevenParts

if TYPE_CHECKING:
    from . import UnalignedUlyssesConfig


def exchange_cost(
    config: RunConfig, layout: Layout, rank: RankKind, options: UnalignedUlyssesConfig
) -> CostChange:
    """Two messages each way; what is kept is of the whole sequence and of this rank's heads."""
    partition, micro_batch = UnevenParts.of(config), config.train.micro_batch_size
    shares = head_shares(rank.heads, rank.query_groups, layout.cp)
    volumes = [
        ExchangeVolume(
            shares=shares,
            rank=place,
            held=held * micro_batch,
            whole=partition.seq_length * micro_batch,
            row_bytes=rank.head_width * rank.item_bytes,
            value_bytes=rank.value_width * rank.item_bytes,
        )
        for place, held in enumerate(partition.lengths(layout.cp))
    ]
    most = max(volumes, key=lambda volume: volume.forward() + volume.backward("full"))
    queries = most.whole * most.share.num_queries / (rank.tokens * rank.heads)
    keys = most.whole * most.share.num_groups / (rank.tokens * rank.query_groups)
    caching = {
        name: tuple(i for i in rank.layers if options.kv_cache_of(i) in kept_by)
        for name, kept_by in (("k", ("half", "full")), ("v", ("full",)))
    }
    kept = [
        *(
            KeptChange(tensors=(f"self_attention.{name}",), factor=queries)
            for name in ("q", "out", "lse")
        ),
        *(
            KeptChange(tensors=(f"self_attention.{name}",), layers=layers, factor=keys)
            for name, layers in caching.items()
            if layers
        ),
    ]
    policies = [options.kv_cache_of(i) for i in rank.layers]
    return CostChange(
        kept=tuple(change for change in kept if change.factor != 1),
        messages=tuple(
            Messages(
                operation="all_to_all",
                group="cp",
                calls=2 * passes,
                sent_bytes=passes * nbytes,
                why=f"heads for sequence, {direction}",
            )
            for kv_cache in dict.fromkeys(policies)
            for passes in (policies.count(kv_cache) * rank.num_micro_batches,)
            for nbytes, direction in (
                (most.forward(), "forward"),
                (most.backward(kv_cache), "backward"),
            )
        ),
    )
