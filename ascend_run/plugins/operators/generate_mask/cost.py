"""Memory of the masks that are held for the length of the run. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import needs_blocks
from ascend_run.ops.attention.visibility import SHARED_BANDS, Shape, rectangles
from ascend_run.plugin_api import Mask, PipelineStage, RunConfig


def bands_bytes(config: RunConfig, rank: PipelineStage) -> float:
    """Return the bytes of the bands of a window, as biases that are added to the scores.

    Materialized scores need no band. The cost model does not know the documents; with them there
    are more bands, at most ``SHARED_BANDS``.
    """
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
    """Return the bytes of one full mask of all queries and keys, one byte per entry."""
    parts = rectangles(_mask(config), *_sides(config), band_block=None)
    return sum(part.num_queries * part.num_keys for part in parts)


def _mask(config: RunConfig) -> Mask:
    window = config.model.window_size
    return Mask(window=tuple(window) if window else None)


def _sides(config: RunConfig) -> tuple[int, int]:
    """Return the queries and keys of a call; those of a ring take at most as many bytes."""
    return config.data.seq_length, config.data.seq_length
