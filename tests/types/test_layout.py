"""Ranks and their groups: against Megatron's own generator, and against the groups themselves."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import Layout
from ascend_run.types import layout as layout_module

with warnings.catch_warnings():  # of the optional libraries that Megatron does without
    warnings.simplefilter("ignore")
    from megatron.core.parallel_state import RankGenerator

SIZES = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any sizes of up to a few hundred ranks that fill both grids."""
    tp, cp, pp, ep, expt_tp = (draw(SIZES) for _ in range(5))
    unit = math.lcm(tp * cp * pp, ep * expt_tp * pp)
    world = unit * draw(st.integers(1, 3))
    return Layout(world_size=world, tp=tp, cp=cp, pp=pp, ep=ep, expt_tp=expt_tp)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_groups_are_those_of_megatron(layout: Layout) -> None:
    order = "tp-cp-ep-dp-pp"  # Megatron's default
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(
        tp=layout.expt_tp, ep=layout.ep, dp=layout.expt_dp, pp=layout.pp, cp=1, order=order
    )
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "pp")):
        assert _lists(layout, *axes) == sorted(dense.get_ranks("-".join(axes)))
    for axes in (("ep",), ("expt_dp",), ("expt_tp",), ("expt_tp", "ep")):
        theirs = "-".join(axis.removeprefix("expt_") for axis in axes)
        assert _lists(layout, *axes) == sorted(expert.get_ranks(theirs))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_a_rank_s_coordinate_is_its_place_in_its_group(layout: Layout) -> None:
    axes = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
    places = list(layout.coordinates(*axes))
    for axis in axes:
        for members in layout.groups(axis):
            for place, rank in enumerate(members):
                assert layout.coordinate(axis, rank) == places[rank][axis] == place


def test_coordinates_of_thousands_of_ranks_list_no_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(world_size=7968, tp=8, pp=4, ep=3)
    monkeypatch.setattr(layout_module, "rank_lists", None)  # all ranks, for each of them again
    found = [layout.coordinate("dp", rank) for rank in range(layout.world_size)]
    assert max(found) == layout.dp - 1


def _lists(layout: Layout, *axes: str) -> list[list[int]]:
    return sorted([*ranks] for ranks in layout.groups(*axes))
