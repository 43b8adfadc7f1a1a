"""The rectangles of a mask, against the mask's rules applied to every query-key pair."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.ops.attention.blockwise_attention import band
from ascend_run.ops.attention.visibility import Rectangle, Shape, rectangles
from ascend_run.plugin_api import Mask
from tests.support.attention_reference import visible

bounds = st.integers(-1, 6)
masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.none() | st.tuples(bounds, bounds),
    document_ends=st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple),
    query_start=st.integers(0, 20),
    key_start=st.integers(0, 20),
)


def painted(parts: tuple[Rectangle, ...], num_queries: int, num_keys: int) -> Tensor:
    """Count how often each query-key pair is computed."""
    times = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for part in parts:
        shown = torch.ones(part.queries.stop - part.queries.start, part.key_end - part.key_start)
        if part.shape is not Shape.FULL:
            shown = band(part, shown) == 0
        times[part.queries, part.keys] += shown.long()
    return times


@settings(max_examples=300, deadline=None)
@given(masks, st.integers(1, 20), st.integers(1, 20), st.none() | st.integers(1, 7))
def test_each_visible_pair_is_computed_once_and_no_other(
    mask: Mask, num_queries: int, num_keys: int, block: int | None
) -> None:
    parts = rectangles(mask, num_queries, num_keys, block)
    expected = visible(mask, num_queries, num_keys)
    assert torch.equal(painted(parts, num_queries, num_keys), expected.long())
    rows = [row for part in parts for row in range(part.query_start, part.query_end)]
    assert len(rows) == len(set(rows)) == int(expected.any(1).sum())


def test_a_plain_causal_mask_is_one_fused_call() -> None:
    assert rectangles(Mask(), 9, 9) == (Rectangle(0, 9, 0, 9, Shape.CAUSAL, -9, 0),)


def test_a_chunk_in_the_past_is_full_and_one_in_the_future_is_nothing() -> None:
    (part,) = rectangles(Mask(query_start=8, key_start=4), 4, 4)
    assert part.shape is Shape.FULL
    assert rectangles(Mask(query_start=4, key_start=8), 4, 4) == ()


def test_queries_before_the_first_key_are_skipped_and_others_causal() -> None:
    (part,) = rectangles(Mask(query_start=0, key_start=3), 8, 8)
    assert (part.queries, part.keys) == (slice(3, 8), slice(0, 5))
    assert part.shape is Shape.CAUSAL


def test_documents_are_apart() -> None:
    parts = rectangles(Mask(document_ends=(3, 8)), 8, 8)
    assert [(p.queries, p.keys, p.shape) for p in parts] == [
        (slice(0, 3), slice(0, 3), Shape.CAUSAL),
        (slice(3, 8), slice(3, 8), Shape.CAUSAL),
    ]


def test_a_window_computes_no_more_than_its_band() -> None:
    parts = rectangles(Mask(window=(64, 0)), 2048, 2048)
    area = sum((p.query_end - p.query_start) * (p.key_end - p.key_start) for p in parts)
    assert area <= 2048 * (256 + 64)
