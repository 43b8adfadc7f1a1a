"""Where states are on the platform of the tests: on a GPU in pinned memory, on the CPU in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.support.costs import planned

from .virtual_jobs import placed

NAME: Final = ("virtual-optimizer",)
PLATFORM: Final = os.environ.get(PLATFORM_VARIABLE, "cpu")
VALUES: Final[dict[str, Any]] = {
    **DENSE,
    **({} if PLATFORM == "cpu" else {"model.hidden_size": 128, "model.vocab_size": 8192}),
    "train.precision": "bf16",
    "platform": PLATFORM,
}
"""On a GPU tables of 4 MiB in float32: its allocator rounds up smaller ones."""


def test_states_take_no_memory_of_the_device(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """And keep every bit."""
    folder = {"plugins.virtual-optimizer.folder": str(tmp_path)} if PLATFORM == "cpu" else {}
    gloo_pool.run(placed, 1, VALUES, ())  # leaves what processes keep
    ((plain, plain_bytes),) = gloo_pool.run(placed, 1, VALUES, ())
    ((ours, our_bytes),) = gloo_pool.run(placed, 1, {**VALUES, **folder}, NAME)
    _, (cost,) = planned({**VALUES, "platform": "cpu"})
    assert ours == plain
    assert plain_bytes - our_bytes == pytest.approx(8 * cost.trained_parameters, rel=0.02)
