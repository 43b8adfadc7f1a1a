"""Projections of shards add up to those of the full tensor, and show where its elements are."""

from __future__ import annotations

import pytest
import torch

from ascend_run.tools.verify.capture.projections import projections

SHAPE = (4, 6)
FULL = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EXPECTED = projections(FULL, (0, 0), SHAPE)


def test_shards_add_up_to_the_full_tensor() -> None:
    found = [
        projections(FULL[row : row + 2, column : column + 3], (row, column), SHAPE)
        for row in (0, 2)
        for column in (0, 3)
    ]
    assert [*map(sum, zip(*found, strict=True))] == pytest.approx(EXPECTED, rel=1e-12)


def test_flat_ranges_add_up_to_the_full_tensor() -> None:
    """As a distributed optimizer holds them."""
    halves = []
    for held in (slice(0, 11), slice(11, 24)):
        half = torch.full(SHAPE, torch.nan, dtype=torch.float64)
        half.view(-1)[held] = FULL.view(-1)[held]
        halves.append(projections(half, (0, 0), SHAPE))
    assert [half[0] for half in halves] == [11, 13]
    assert [*map(sum, zip(*halves, strict=True))] == pytest.approx(EXPECTED, rel=1e-12)


@pytest.mark.parametrize("change", [torch.neg, lambda x: x.roll(1, 0), lambda x: x.flip(1)])
def test_a_change_that_keeps_the_norm_is_seen(change) -> None:  # type: ignore[no-untyped-def]
    found = projections(change(FULL), (0, 0), SHAPE)
    assert found[1] == pytest.approx(EXPECTED[1])
    assert abs(found[2] - EXPECTED[2]) + abs(found[3] - EXPECTED[3]) > 1.0
