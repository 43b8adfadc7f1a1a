"""The plugin's declarations, refusals, buckets and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import Numerics, PluginResolutionError
from ascend_run.plugins.memory.swap_optimizer import SwapOptimizer, SwapOptimizerConfig
from ascend_run.plugins.memory.swap_optimizer.buckets import buckets
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

NAME = ("swap-optimizer",)
FOLDER = "plugins.swap-optimizer.folder"
BF16 = {**DENSE, "train.precision": "bf16"}
DISTRIBUTED = {"ddp.use_distributed_optimizer": True}


def test_it_changes_no_bit() -> None:
    assert SwapOptimizer.manifest.numerics is Numerics.BITWISE


def test_a_bucket_has_elements() -> None:
    with pytest.raises(ValueError, match="bucket_size"):
        SwapOptimizerConfig(bucket_size=0)


@pytest.mark.needs_plugins("reuse-fp32-param")
def test_master_weights_in_halves_are_refused() -> None:
    with pytest.raises(PluginResolutionError, match="half of each master weight") as caught:
        planned(BF16, ("reuse-fp32-param", *NAME))
    assert "swap-optimizer" in str(caught.value)


def test_buckets_are_filled_in_order() -> None:
    numels = [3, 4, 9, 1, 1, 8]
    assert [[*one] for one in buckets(numels, 8)] == [[0, 1], [2], [3, 4], [5]]
    assert [[*one] for one in buckets(numels, 1)] == [[at] for at in range(6)]
    assert [[*one] for one in buckets(numels, 100)] == [[*range(6)]]
    assert [*buckets([], 8)] == []


@pytest.mark.parametrize("more", [{}, DISTRIBUTED], ids=["replicated", "distributed"])
@pytest.mark.parametrize(("precision", "item"), [("fp32", 8), ("bf16", 12)], ids=["fp32", "bf16"])
def test_plan_counts_states_off_the_device(
    tmp_path: Path, precision: str, item: int, more: dict[str, Any]
) -> None:
    """In memory of the host, or in files; the CPU's host is the device."""
    values = {**DENSE, **more, "train.precision": precision}
    _, (plain,) = planned(values, (), 2)
    _, (host,) = planned(values, NAME, 2)
    _, (file,) = planned({**values, FOLDER: str(tmp_path)}, NAME, 2)
    numel = plain.trained_parameters / (2 if more else 1)
    scalars = 4 * len(plain.rank.parameters)
    assert plain.memory.optimizer == item * numel + scalars
    assert plain.memory.off_device == plain.memory.host == 0
    for cost in (host, file):
        assert cost.memory.optimizer == scalars
        assert cost.memory.off_device == item * numel
        assert cost.memory.host == 0
    assert host.memory.activations - file.memory.activations == item * numel
