"""Runs with swap-attention against the run without it: the same bits."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.parity import Parity

EVERYTHING = {"plugins.swap-attention.min_bytes": 1}
SWAPPED = "swap-attention/swap_bytes"


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_bit_changes_and_bytes_are_swapped(parity: Parity, prefetch: int, model: str) -> None:
    options = {**EVERYTHING, "plugins.swap-attention.prefetch": prefetch}
    (outcome,) = parity("swap-attention", model=model, options=options)
    assert outcome.metrics[SWAPPED] > 0


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_no_bit_changes_on_several_ranks(parity: Parity, layout: dict[str, int]) -> None:
    for outcome in parity("swap-attention", layout=layout, options=EVERYTHING):
        assert outcome.metrics[SWAPPED] > 0


def test_the_default_leaves_a_tiny_models_tensors_where_they_are(parity: Parity) -> None:
    (outcome,) = parity("swap-attention")
    assert outcome.metrics[SWAPPED] == 0
