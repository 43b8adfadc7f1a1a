"""What the masks take that are held for the length of the run. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import needs_blocks
from ascend_run.ops.attention.visibility import SHARED_BANDS, CausalMask, Shape, rectangles
from ascend_run.plugin_api import RankKind, RunConfig


def bands_bytes(config: RunConfig, rank: RankKind) -> float:
    """Bands of a window, as numbers that are added to the scores; scores that are at hand are given
    none. Documents are not known to a plan; with them there are more, at most ``SHARED_BANDS``."""
    if needs_blocks(rank.attention_needs):
        return 0.0
    bands = {
        (part.num_queries, part.num_keys, part.low, part.high)
        for part in rectangles(_mask(config), *_sides(config))
        if part.shape is Shape.BAND
    }
    sizes = sorted((rows * columns for rows, columns, *_ in bands), reverse=True)
    return sum(sizes[:SHARED_BANDS]) * rank.item_bytes


def whole_bytes(config: RunConfig) -> float:
    """One mask of all queries and keys, a byte each."""
    parts = rectangles(_mask(config), *_sides(config), band_block=None)
    return sum(part.num_queries * part.num_keys for part in parts)


def _mask(config: RunConfig) -> CausalMask:
    window = config.model.window_size
    return CausalMask(window=tuple(window) if window else None)


def _sides(config: RunConfig) -> tuple[int, int]:
    """Queries and keys of a call; those of a ring are smaller, and as many bytes at most."""
    return config.data.seq_length, config.data.seq_length
