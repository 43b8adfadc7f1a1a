"""Which ranks pass keys to which, and errors, before torch is imported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.context_parallel.blocks import holder
from ascend_run.plugin_api import Layout
from ascend_run.plugins.sequence.double_ring import DoubleRing, DoubleRingConfig
from tests.support.ring_jobs import run_of

SIZES = [(size, window) for size in range(1, 17) for window in range(1, size + 1)]


def groups(layout: Layout, window: int) -> dict[str, list[tuple[int, ...]]]:
    plugin = DoubleRing(DoubleRingConfig(window=window))
    return dict(plugin.ascend_process_groups(config=run_of(layout.cp), layout=layout))


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
    """From the previous rank in the window; at its end, from the rank at the same index of the
    previous window, what it held first."""
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
