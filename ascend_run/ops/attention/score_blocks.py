"""Cost of attention with materialised scores (``blockwise_attention``). No torch."""

# S sequence, D width of q and k, E width of v

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, Final

import attrs

from ascend_run.types.attention import Mask
from ascend_run.types.config import RunConfig
from ascend_run.types.cost import PipelineStage

from .visibility import QUERY_BLOCK, rectangles

CHANGING_SCORES: Final = frozenset({"bias", "position_bias", "softcap", "dropout"})
"""Features that fused kernels on CPU and CUDA do not support in backward."""
_BLOCKS: Final = 5
"""In backward: scores, probabilities, their gradients and intermediates."""
_MORE_BLOCKS: Final[Mapping[str, int]] = {"dropout": 3, "softcap": 2}
_BEFORE: Final = 2
"""Blocks of the previous rectangle, which are freed late."""
_ROWS: Final = 4
"""float32 tensors of a rectangle's queries."""
_WIDE: Final = 4


@attrs.frozen(kw_only=True)
class BlockCost:
    """Cost on one rank."""

    scores_bytes: float
    """Held during one backward."""
    output_bytes: float
    """Saved in each layer in addition to the output: heads are written one after the other, so the
    projection needs a contiguous copy."""
    flops: float
    """Per step, in addition to those of visible pairs: a rectangle on the diagonal is computed in
    full."""


def needs_blocks(attention_needs: Collection[str]) -> bool:
    """Return whether a run's attention cannot use a fused kernel on CPU and CUDA."""
    return not CHANGING_SCORES.isdisjoint(attention_needs)


def block_cost(config: RunConfig, cp: int, rank: PipelineStage) -> BlockCost:
    """Compute the cost from the rectangles of a full sequence, of which each of the cp ranks has an
    equal share of the heads or of the pairs.

    Args:
        cp: Ranks that share a sequence.
    """
    length, window = config.data.seq_length, config.model.window_size
    mask = Mask(window=tuple(window) if window else None)
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


def _widened(rank: PipelineStage) -> float:
    """Bytes of keys and values in float32, and of their gradients."""
    numbers = 2 * rank.tokens * rank.query_groups * rank.head_width
    more = _WIDE - rank.item_bytes
    return float(numbers * (_WIDE + more)) if more else 0.0


def pairs_flops(config: RunConfig, cp: int, rank: PipelineStage) -> float:
    """Return FLOPs per step on one rank for each query-key pair of a full sequence: two matmuls in
    forward and five in backward, 8 D + 6 E a head.

    Args: as ``block_cost``.
    """
    heads = config.train.micro_batch_size * rank.heads / cp
    return float(rank.layer_passes * heads * 2 * (8 * rank.head_width - rank.value_width))


def pairs_seen(length: int, window: Any) -> float:
    """Return the number of query-key pairs that a causal mask leaves visible.

    Args:
        window: Keys before the query and after it; None or -1: all.
    """
    reach = length if not window or window[0] < 0 else min(length, window[0] + 1)
    return float(reach * (length - (reach - 1) / 2))
