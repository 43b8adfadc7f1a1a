"""What gathering costs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.ops.attention.ring_attention.volume import SUM_BYTES
from ascend_run.plugin_api import (
    CostChange,
    KeptChange,
    KeptTensor,
    Layout,
    Messages,
    Moment,
    RankKind,
    WorkingMemory,
)

if TYPE_CHECKING:
    from . import KvAllgatherCpConfig

_KEPT: Final = {"none": (), "half": ("k",), "full": ("k", "v")}
"""Policy -> what of the whole sequence is kept, in the place of a rank's own."""


def gathering_cost(layout: Layout, rank: RankKind, options: KvAllgatherCpConfig) -> CostChange:
    """Own keys and values go out in forward, what was not kept of them again in backward, and sums
    for everybody's in float32."""
    kept = _KEPT[options.kv_cache]
    keeping = options.caching(rank.layers)
    received = KeptTensor(
        part="self_attention",
        name="received",
        nbytes=layout.cp * sum(_own_bytes(rank)[name] for name in kept),
    )
    own = tuple(f"self_attention.{name}" for name in kept)
    return CostChange(
        kept=(KeptChange(tensors=own, layers=keeping, factor=0.0),) if keeping else (),
        kept_added=(received,) if keeping else (),
        kept_added_layers=keeping,
        working=(*_working(layout, rank, options),),
        messages=(*_messages(layout, rank, options, len(keeping)),),
    )


def _own_bytes(rank: RankKind) -> dict[str, float]:
    """Of this rank's keys and of its values."""
    rows = rank.tokens * rank.query_groups * rank.item_bytes
    values = rows * rank.value_width
    return {"k": 2 * rows * rank.head_width - values, "v": values}


def _messages(
    layout: Layout, rank: RankKind, options: KvAllgatherCpConfig, num_keeping: int
) -> Iterator[Messages]:
    parts, own, kept = _num_parts(rank, options), _own_bytes(rank), _KEPT[options.kv_cache]
    both, again = sum(own.values()), sum(own[name] for name in own if name not in kept)
    passes, caching = rank.layer_passes, num_keeping * rank.num_micro_batches
    calls = passes - (caching if options.kv_cache == "full" else 0)
    resent = (passes - caching) * both + caching * again
    sums = layout.cp * both * SUM_BYTES / rank.item_bytes
    for operation, times, nbytes, why in (
        ("all_gather", passes, passes * both, "keys and values, forward"),
        ("all_gather", calls, resent, "keys and values, backward"),
        ("reduce_scatter", passes, passes * sums, "gradients of keys and values"),
    ):
        if times:
            yield Messages(
                operation=operation,
                group="cp",
                calls=parts * times,
                sent_bytes=nbytes,
                why=why,
                # The last sums have nothing beside them; gathers have the rank's own block.
                hidden=operation == "all_gather" or parts > 1,
            )


def _working(
    layout: Layout, rank: RankKind, options: KvAllgatherCpConfig
) -> Iterator[WorkingMemory]:
    """Of a part of the heads, and of the next one, which is coming in meanwhile."""
    parts = _num_parts(rank, options)
    share = min(options.groups_at_once or rank.query_groups, rank.query_groups)
    held = layout.cp * sum(_own_bytes(rank).values()) * share / rank.query_groups * min(2, parts)
    for moment, nbytes in (
        (Moment.FORWARD, held),
        (Moment.BACKWARD, held * (1 + SUM_BYTES / rank.item_bytes)),
    ):
        yield WorkingMemory(part="self_attention", name="gathered", nbytes=nbytes, moment=moment)


def _num_parts(rank: RankKind, options: KvAllgatherCpConfig) -> int:
    return math.ceil(rank.query_groups / (options.groups_at_once or rank.query_groups))
