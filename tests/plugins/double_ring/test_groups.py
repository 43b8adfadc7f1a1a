"""Who passes keys to whom, and what is refused, before torch is imported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.ring_attention.blocks import holder
from ascend_run.plugin_api import Claim, Layout, Numerics
from ascend_run.plugins.double_ring import DoubleRing, DoubleRingConfig
from tests.support.ring_jobs import run_of

SIZES = [(size, window) for size in range(1, 17) for window in range(1, size + 1)]


def groups(layout: Layout, window: int) -> dict[str, list[tuple[int, ...]]]:
    plugin = DoubleRing(DoubleRingConfig(window=window))
    return dict(plugin.ascend_process_groups(layout=layout))  # type: ignore[arg-type]


def test_windows_are_neighbours_in_the_sequence_not_in_the_world() -> None:
    layout = Layout(world_size=16, tp=2, cp=4, pp=2)
    assert groups(layout, 2) == {
        "double_ring_window": [
            (0, 2),
            (4, 6),
            (1, 3),
            (5, 7),
            (8, 10),
            (12, 14),
            (9, 11),
            (13, 15),
        ],
        "double_ring_windows": [
            (0, 4),
            (2, 6),
            (1, 5),
            (3, 7),
            (8, 12),
            (10, 14),
            (9, 13),
            (11, 15),
        ],
    }


@given(sizes=st.sampled_from([s for s in SIZES if s[0] % s[1] == 0]))
def test_a_hop_brings_the_keys_of_the_next_step_and_every_rank_sees_all(
    sizes: tuple[int, int],
) -> None:
    """Of the rank before in the window; at its end, of that window's rank in the same place, from
    what it held first."""
    size, window = sizes
    for rank in range(size):
        held = [holder(rank, step, size, window) for step in range(size)]
        assert sorted(held) == [*range(size)]
        assert held[0] == rank
        before = rank // window * window + (rank - 1) % window
        for step in range(1, size):
            if step % window:
                assert held[step] == holder(before, step - 1, size, window)
            else:
                assert held[step] == holder((rank - window) % size, step - window, size, window)


@pytest.mark.parametrize(("cp", "window"), [(6, 4), (4, 3), (2, 4)])
def test_a_window_that_does_not_divide_is_refused_with_those_that_do(cp: int, window: int) -> None:
    plugin = DoubleRing(DoubleRingConfig(window=window))
    layout = Layout(world_size=cp, cp=cp)
    (problem,) = plugin.ascend_check(config=run_of(cp), layout=layout)
    assert f"plugins.double-ring.window={window}" in problem
    assert f"parallel.context_parallel_size={cp}" in problem
    assert {2: "1 or 2", 4: "1, 2 or 4", 6: "1, 2, 3 or 6"}[cp] in problem
    assert groups(layout, window) == {}


def test_it_is_idle_exactly_where_no_sequence_is_split() -> None:
    plugin = DoubleRing(DoubleRingConfig())
    assert plugin.ascend_check(config=run_of(1), layout=Layout(cp=1, world_size=1)) == []
    assert groups(Layout(cp=1, world_size=1), 2) == {}
    assert plugin.manifest.idle is not None
    assert not plugin.manifest.idle.holds(run_of(2))


def test_it_owns_the_sequence_exchange_and_changes_rounding_only() -> None:
    assert DoubleRing.manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert DoubleRing.manifest.numerics is Numerics.ROUNDING
