"""What ``plan`` counts as an update's working memory is the page's formula.

``tests/tools/plan/cost_model/test_optimizers.py`` measures it in runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from ascend_run.plugins.optimizers.muon import MuonConfig
from ascend_run.plugins.optimizers.muon.cost import update_bytes
from ascend_run.plugins.optimizers.muon.parameters import FusedRows

QKV: Final = FusedRows(4, (2, 1, 1))
GATED: Final = FusedRows(1, (1, 1), by_rank=True)
BATCH: Final = "ascend_run.plugins.optimizers.muon.parameters._ELEMENTS_AT_ONCE"
FLOAT32: Final = {"ns_dtype": "float32"}
FORMULAS: Final[Mapping[str, tuple[Mapping[str, Any], Callable[[int, int], int]]]] = {
    "bfloat16": ({}, lambda n, g: 6 * n),
    "bfloat16, no look-ahead": ({"nesterov": False}, lambda n, g: 4 * n + 2 * g),
    "float32": (FLOAT32, lambda n, g: 8 * n + 4 * g),
    "float32, no look-ahead": ({**FLOAT32, "nesterov": False}, lambda n, g: 8 * n + 4 * g),
}
"""The page's, of n elements that are orthogonalized at once and g of their Gram matrices."""
SHAPES: Final[Mapping[str, tuple[tuple[int, ...], FusedRows | None, tuple[int, int, int]]]] = {
    "wide": ((48, 96), None, (1, 48, 96)),
    "tall": ((96, 48), None, (1, 96, 48)),
    "queries, keys, values": ((4 * (2 + 1 + 1) * 8, 96), QKV, (1, 64, 96)),
    "gate and up": ((128, 48), GATED, (1, 64, 48)),
    "experts, two at once": ((5, 128, 48), GATED, (2, 64, 48)),
    "an expert larger than a batch": ((3, 256, 64), None, (1, 256, 64)),
}
"""Parameter -> its shape, and [E, A, B] of the most that is orthogonalized at once."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_an_update_takes_what_the_page_says(
    formula: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BATCH, 2 * 128 * 48)
    options, expected = FORMULAS[formula]
    shape, rows, (count, num_rows, num_columns) = SHAPES[name]
    n, g = count * num_rows * num_columns, count * min(num_rows, num_columns) ** 2
    assert update_bytes(shape, rows, MuonConfig(**options)) == expected(n, g)


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "rows", "sizes"),
    [
        ((192, 96), GATED, (96 * 96, 96**2)),
        ((96, 96), None, (96 * 96, 96**2)),
        ((4, 128, 48), GATED, (4 * 64 * 48, 4 * 48**2)),
        ((4, 48, 256), None, (4 * 48 * 256, 4 * 48**2)),
        ((4 * 4 * 8, 96), QKV, (64 * 96, 64**2)),
        ((9, 256, 64), None, (3 * 256 * 64, 3 * 64**2)),
    ],
    ids=str,
)
def test_a_gathered_update_takes_what_the_page_says(
    shape: tuple[int, ...],
    rows: FusedRows | None,
    sizes: tuple[int, int],
    ns_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BATCH, 4 * 48 * 256)
    options = MuonConfig(ns_dtype=ns_dtype)
    item, (n, g), whole = (2 if ns_dtype == "bfloat16" else 4), sizes, math.prod(shape)
    expected = item * whole + max(4 * whole // 2, item * (2 * n + g))
    assert update_bytes(shape, rows, options, 2) == expected
