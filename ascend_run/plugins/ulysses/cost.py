"""What the exchange costs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_run.ops.attention.exchange_volume import ExchangeVolume
from ascend_run.ops.attention.head_shares import head_shares
from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import CostChange, KeptChange, Layout, Messages, RankKind

if TYPE_CHECKING:
    from . import UlyssesConfig


def exchange_cost(layout: Layout, rank: RankKind, options: UlyssesConfig) -> CostChange:
    """Two messages each way, and to each rank the key-value heads that it needs; or gathered ones.

    What the kernel keeps it keeps of the whole sequence and fewer heads: as many bytes, but for
    key-value heads that several ranks need.
    """
    volume = ExchangeVolume(
        shares=head_shares(rank.heads, rank.query_groups, layout.cp),
        rank=0,
        held=rank.tokens,
        whole=rank.tokens * layout.cp,
        row_bytes=rank.head_width * rank.item_bytes,
        value_bytes=rank.value_width * rank.item_bytes,
    )
    times = layout.cp * volume.share.num_groups / rank.query_groups
    changes = (
        KeptChange(
            tensors=(f"self_attention.{name}",),
            layers=tuple(i for i in rank.layers if options.kv_cache_of(i) in kept_by),
            factor=times,
        )
        for name, kept_by in (("k", ("half", "full")), ("v", ("full",)))
    )
    policies = [options.kv_cache_of(i) for i in rank.layers]
    return CostChange(
        kept=tuple(change for change in changes if change.layers and times != 1),
        messages=tuple(
            message
            for kv_cache in dict.fromkeys(policies)
            for message in _messages(
                volume, kv_cache, policies.count(kv_cache) * rank.num_micro_batches, options
            )
        ),
    )


def _messages(
    volume: ExchangeVolume, kv_cache: KvCache, passes: int, options: UlyssesConfig
) -> Iterator[Messages]:
    """Of so many attentions that keep the same."""
    gathers = options.kv == "all-gather"
    for nbytes, direction in (
        (volume.forward(with_keys=not gathers), "forward"),
        (volume.backward(kv_cache, with_keys=not gathers), "backward"),
    ):
        yield Messages(
            operation="all_to_all",
            group="cp",
            calls=2 * passes,
            sent_bytes=passes * nbytes,
            why=f"heads for sequence, {direction}",
        )
    if not gathers:
        return
    for nbytes, direction in (
        (2 * volume.held * volume.row_bytes, "forward"),
        (volume.held * volume.again(kv_cache), "backward"),
    ):
        if nbytes:
            yield Messages(
                operation="all_gather",
                group="cp",
                calls=passes,
                sent_bytes=passes * nbytes,
                why=f"keys and values, {direction}",
            )
