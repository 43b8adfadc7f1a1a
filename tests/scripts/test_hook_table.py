"""The page of hooks is fresh, and every hook has a plugin or the feature that will be its first."""

from __future__ import annotations

import attrs
import pytest

from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.registry.discovery import discover
from scripts.hook_table import PAGE, PLANNED, called, page, unfounded, users

CATALOGUE = discover()
POINTS = hook_points()
EACH_HAS_ONE = {name: [] if point.first_user else ["any"] for name, point in POINTS.items()}
"""Plugins of each hook that awaits none."""


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(CATALOGUE), "run scripts/hook_table.py"


def test_every_hook_has_a_plugin_or_names_the_first_to_come() -> None:
    assert unfounded(POINTS, users(CATALOGUE)) == []
    assert sorted({*PLANNED} & {*CATALOGUE}) == []


def test_a_hook_with_neither_or_with_both_is_reported() -> None:
    points = {
        name: attrs.evolve(POINTS[name], first_user=first)
        for name, first in (("ascend_norm", None), ("ascend_layer", "tflops"))
    }
    *_, neither, both = unfounded(points, {"ascend_norm": [], "ascend_layer": ["compile"]})
    assert neither.startswith("ascend_norm has no plugin: set first_user")
    assert both.startswith("ascend_layer has a plugin (compile): delete first_user='tflops'")


def test_a_first_user_that_is_not_planned_is_reported() -> None:
    invented = attrs.evolve(POINTS["ascend_norm"], first_user="invented")
    (found,) = unfounded({**POINTS, "ascend_norm": invented}, EACH_HAS_ONE)
    assert found.startswith("ascend_norm names 'invented' as first_user, which is not in PLANNED")


def test_a_planned_feature_that_no_hook_awaits_is_reported() -> None:
    points = {name: point for name, point in POINTS.items() if point.first_user != "fsdp2"}
    assert unfounded(points, EACH_HAS_ONE) == ["no hook names 'fsdp2': delete it from PLANNED"]


@pytest.mark.parametrize("name", POINTS)
def test_every_contract_says_when_the_hook_is_called(name: str) -> None:
    assert called(POINTS[name])


def test_a_row_has_kind_claim_and_implementing_plugins() -> None:
    rows = [line.split(" | ") for line in page(CATALOGUE).splitlines()]
    (device,) = (row for row in rows if row[0] == "| `ascend_device`")
    assert device[1:3] == ["provider", "`platform`"]
    assert "[cpu](plugins/platforms/cpu.md)" in device[-1]
    (norm,) = (row for row in rows if row[0] == "| `ascend_norm`")
    assert norm[-1] == "planned: tp-2d |"
