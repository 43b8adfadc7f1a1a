"""The hook specifications keep to one rule for their kinds, arguments and claims."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import ascend_run.plugin_api as api
from ascend_run import types
from ascend_run.plugin_api import Claim, HookKind, Point, contracts
from ascend_run.plugin_api.hook_kinds import HookPoint
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.tools.new_plugin.public_names import public_names

POINTS = hook_points()
BUILDS_A_MODEL = ("config", "device", "groups", "role")
ASKED_BEFORE_A_MODEL = {
    "ascend_empty_layers",
    "ascend_model_family",
    "ascend_sequence_partition",
}
"""Torch-free, so without a device or groups."""


def of_the_model_build() -> list[HookPoint]:
    points = (Point.MODEL, Point.ATTENTION, Point.MOE)
    return [p for p in POINTS.values() if p.point in points and p.name not in ASKED_BEFORE_A_MODEL]


@pytest.mark.parametrize("point", of_the_model_build(), ids=lambda point: point.name)
def test_every_hook_of_the_model_build_is_asked_with_the_same(point: HookPoint) -> None:
    assert point.arguments[:4] == BUILDS_A_MODEL
    assert {*point.arguments[4:]} <= {"layer_index", "name", "num_layers", "ops"}


def test_every_provider_has_a_claim_of_its_own_and_nothing_else_has_one() -> None:
    providers = [p for p in POINTS.values() if p.kind is HookKind.PROVIDER]
    claims = [p.claim for p in providers]
    assert None not in claims
    assert len(claims) == len(set(claims))
    assert [p.name for p in POINTS.values() if p.claim and p.kind is not HookKind.PROVIDER] == []


def test_claims_without_a_hook_are_said_to_be_reserved_or_explained() -> None:
    hooked = {p.claim for p in POINTS.values()}
    for claim in Claim:
        if claim not in hooked:
            assert f"``{claim}``" in (Claim.__doc__ or ""), claim


def test_a_wrapper_names_a_provider_that_there_is() -> None:
    wrapped = [p.wraps for p in POINTS.values() if p.wraps]
    assert wrapped
    assert all(POINTS[name].kind is HookKind.PROVIDER for name in wrapped)


def test_every_type_that_crosses_a_hook_is_exported_by_the_package() -> None:
    offered = {*public_names(api)}
    exported = {name for name in vars(contracts) if name.isidentifier() and name[0] != "_"}
    for module in pkgutil.iter_modules(types.__path__):
        if module.name in ("layout", "api_version"):  # what is exported has functions beside it
            continue
        found = importlib.import_module(f"{types.__name__}.{module.name}")
        own = {
            name
            for name, value in vars(found).items()
            if getattr(value, "__module__", None) == found.__name__ and not name.startswith("_")
        } - {"T", "Saved"}
        assert own <= offered, module.name
        if module.name not in ("config", "condition", "declarations"):  # records of no hook
            assert own <= exported, module.name
    assert {"Wrapper", "BatchIterator", "MetricValue"} | exported <= offered


def test_importing_every_part_of_it_imports_no_torch() -> None:
    program = "import sys, ascend_run.plugin_api.hookspecs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
