"""A plan as records, as JSON values, and read from the ``plan.json`` of other versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.prepare.plan.json_values import plan_text, plan_values
from ascend_run.prepare.plan.records import Bundle, Plan, PlannedRank
from ascend_run.prepare.prepare import prepare
from ascend_run.tools.pages.record_reading import read_plan

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = [field.name for field in attrs.fields(Plan)]


def test_a_plan_survives_its_json(file: Path) -> None:
    plan = attrs.evolve(
        prepare(file).plan, level=Bundle(level=1, members=("a",), left_out={"b": "why"})
    )
    assert read_plan(json.loads(plan_text(plan))) == plan
    assert json.loads(plan_text(plan)) == plan_values(plan)


def test_the_keys_are_the_fields_in_order(file: Path) -> None:
    assert [*plan_values(prepare(file).plan)] == [name for name in FIELDS if name != "level"]


def test_what_a_file_lacks_is_empty() -> None:
    plan = read_plan({"plugins": [{"name": "ring"}], "layout": {"axes": {"tp": 2}}})
    (plugin,) = plan.plugins
    assert (plugin.name, plugin.kind, plugin.version, plugin.claims) == ("ring", "feature", "", ())
    assert (plan.layout.axes, plan.layout.world_size) == ({"tp": 2}, None)
    assert (plan.device, plan.hooks, plan.idle, plan.level) == ("", (), {}, None)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{"rank": 3, "dp": 1}], (PlannedRank(rank=3, dp=1),)),
        ([{"rank": 0, "dp": "?"}], (PlannedRank(rank=0),)),
        ([{"dp": 1}, 5, None, {"rank": True}, {"rank": 1}], (PlannedRank(rank=1),)),
        ({"rank": 1}, ()),
    ],
)
def test_members_of_the_wrong_type_are_left_out(ranks: Any, expected: Any) -> None:
    assert read_plan({"ranks": ranks}).ranks == expected


@given(
    st.one_of(json_values, st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, json_values)))
)
def test_any_json_is_read_as_a_plan(values: Any) -> None:
    plan = read_plan(values)
    assert read_plan(plan_values(plan)) == plan
