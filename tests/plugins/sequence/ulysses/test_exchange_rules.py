"""Declarations and errors of every context-parallel plugin; see ``conftest.exchange``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.plugin_api import Layout
from ascend_run.registry.discovery import discover

from .test_rules import config


@pytest.fixture(scope="module")
def plugin(exchange: str) -> Any:
    """Return the plugin with default options."""
    (found,) = discover().load([exchange]).values()
    options = getattr(found, "config_class", None)
    return found(options()) if options else found()


def problems(plugin: Any, heads: int, tp: int, cp: int) -> list[str]:
    layout = Layout(world_size=tp * cp, tp=tp, cp=cp)
    return list(plugin.ascend_check(config=config(heads=heads, tp=tp, cp=cp), layout=layout))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 8), (2, 4), (4, 2)])
def test_sizes_that_divide_are_accepted(plugin: Any, tp: int, cp: int) -> None:
    assert problems(plugin, 8, tp, cp) == []


def test_heads_that_cannot_be_shared_are_refused(plugin: Any) -> None:
    (problem,) = problems(plugin, 10, 1, 4)
    assert "10 heads" in problem
    assert "cp=4" in problem


@given(size=st.integers(1, 16), part=st.integers(1, 64))
def test_the_ranks_chunks_are_the_sequence_once_and_in_order(
    plugin: Any, size: int, part: int
) -> None:
    partition = plugin.ascend_sequence_partition(config=config(cp=2))
    chunks = [chunk for rank in range(size) for chunk in partition.chunks(size * part, rank, size)]
    positions = [p for start, stop in chunks for p in range(start, stop)]
    assert positions == list(range(size * part))
