"""What attention costs where its scores are at hand (``blockwise_attention``). No torch."""

# S sequence, D width of q and k, E width of v

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, Final

import attrs

from .visibility import QUERY_BLOCK, CausalMask, rectangles

CHANGING_SCORES: Final = frozenset({"bias", "position_bias", "softcap", "dropout"})
"""What a fused kernel on the CPU and on CUDA cannot follow in backward."""
_BLOCKS: Final = 5
"""In backward: scores, probabilities, their gradients and what is between them."""
_MORE_BLOCKS: Final[Mapping[str, int]] = {"dropout": 3, "softcap": 2}
_BEFORE: Final = 2
"""Blocks of the rectangle before, which are let go of late."""
_ROWS: Final = 4
"""Wide tensors of a rectangle's queries."""
_WIDE: Final = 4


@attrs.frozen(kw_only=True)
class BlockCost:
    """On one rank."""

    scores_bytes: float
    """Held in one backward."""
    output_bytes: float
    """Kept in each layer beside the output itself: heads are written one after the other, so that
    it is copied for the projection."""
    flops: float
    """In a step, beside those of the pairs that a mask leaves: a rectangle on the diagonal is
    computed whole."""


def needs_blocks(attention_needs: Collection[str]) -> bool:
    """Whether a run's attention cannot be a fused kernel's on the CPU and on CUDA."""
    return not CHANGING_SCORES.isdisjoint(attention_needs)


def block_cost(config: Any, cp: int, rank: Any) -> BlockCost:
    """By the rectangles of a whole sequence, of which each rank that shares it has a part of the
    heads, or of the pairs.

    Args:
        config: A ``RunConfig``.
        cp: Ranks that share a sequence.
        rank: A ``RankKind``.
    """
    length, window = config.data.seq_length, config.model.window_size
    mask = CausalMask(window=tuple(window) if window else None)
    parts = rectangles(mask, length, length, QUERY_BLOCK)
    areas = [part.num_queries * part.num_keys for part in parts]
    blocks = _BLOCKS + sum(n for name, n in _MORE_BLOCKS.items() if name in rank.attention_needs)
    most = max(blocks * area + _BEFORE * last for last, area in pairwise((0, *areas)))
    heads = config.train.micro_batch_size * rank.heads / cp
    rows = _ROWS * min(QUERY_BLOCK, length) * rank.head_width
    return BlockCost(
        scores_bytes=_WIDE * heads * (most + rows) + _widened(rank),
        output_bytes=rank.tokens * rank.heads * rank.value_width * rank.item_bytes,
        flops=pairs_flops(config, cp, rank) * (sum(areas) - pairs_seen(length, window)),
    )


def _widened(rank: Any) -> float:
    """Keys and values in float32, and their gradients."""
    numbers = 2 * rank.tokens * rank.query_groups * rank.head_width
    more = _WIDE - rank.item_bytes
    return float(numbers * (_WIDE + more)) if more else 0.0


def pairs_flops(config: Any, cp: int, rank: Any) -> float:
    """FLOPs in a step on one rank for each pair of a query and a key of a whole sequence: two
    products in forward and five in backward, 8 D + 6 E a head.

    Args: as ``block_cost``.
    """
    heads = config.train.micro_batch_size * rank.heads / cp
    return float(rank.layer_passes * heads * 2 * (8 * rank.head_width - rank.value_width))


def pairs_seen(length: int, window: Any) -> float:
    """Pairs of a query and a key that a causal mask leaves.

    Args:
        window: Keys before the query and after it; None or -1: all.
    """
    reach = length if not window or window[0] < 0 else min(length, window[0] + 1)
    return float(reach * (length - (reach - 1) / 2))
