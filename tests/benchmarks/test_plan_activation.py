"""``plan`` says who is called: a sample of the campaign, and that it sees what is not so."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.hook_kinds import HookKind
from ascend_run.prepare.plan.explanation import HookOwners
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from benchmarks.campaigns import plan_activation
from benchmarks.campaigns.called_hooks import Call
from benchmarks.campaigns.campaign import is_full, read_result, sample
from benchmarks.campaigns.plan_activation import (
    CAMPAIGN,
    FAMILY,
    FEATURES,
    PLUGINS,
    TASK,
    disagreements,
)

SAMPLED = 1
EVERYTHING = "gloo-offload+gmm+lora+noop-layers+swap-attention+tensorboard+ulysses+sft+mixtral"
OF_ALL = pytest.mark.needs_plugins(*FEATURES)
"""The campaign is about sets of all of them."""


@OF_ALL
@pytest.mark.parametrize("place", range(-1, SAMPLED))
def test_a_sample_of_the_sets_is_activated_as_planned(place: int) -> None:
    case = EVERYTHING if place < 0 else sample(CAMPAIGN, SAMPLED)[place]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        assert CAMPAIGN.run(case)["verdict"] == "passed"


@OF_ALL
def test_the_whole_campaign_was_run_and_every_set_agreed() -> None:
    result = read_result(CAMPAIGN.name)

    assert is_full(CAMPAIGN, result)
    assert result["counts"] == {"passed": result["cases"]}
    assert result["passes"]


@OF_ALL
def test_the_twelve_are_ten_features_by_name_a_task_and_a_family() -> None:
    catalog = discover()
    ours = {name: c.kind for name, c in catalog.items() if c.first_party}
    canonical = {p.manifest.name for p in catalog.load(FEATURES).values()}

    assert canonical == {*FEATURES}, "an alias would be the same plugin twice"
    assert [*FEATURES] == sorted(FEATURES)
    assert {ours[name] for name in FEATURES} == {Kind.FEATURE}
    assert [ours[TASK], ours[FAMILY]] == [Kind.TASK, Kind.MODEL]
    assert len({*PLUGINS}) == 12


@OF_ALL
def test_a_kernel_that_wraps_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Hooks._implementations

    def reversed_order(self: Hooks, hook: str) -> list[Any]:
        return original(self, hook)[::-1]

    monkeypatch.setattr(Hooks, "_implementations", reversed_order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = CAMPAIGN.run("lora+swap-attention")

    assert outcome["verdict"] == "disagrees"
    assert "ascend_check is planned for" in outcome["why"]


def planned(hook: str, kind: HookKind, *owners: str) -> HookOwners:
    return HookOwners(hook=hook, kind=kind, point="model", owners=owners, why="")


PLAN = (
    planned("ascend_layer", HookKind.WRAPPER, "inner", "outer"),
    planned("ascend_norm", HookKind.PROVIDER, "one", "two"),
)
SOUND = [
    *("ascend_layer inner asked", "ascend_layer inner applied"),
    *("ascend_layer outer asked", "ascend_layer outer applied"),
    *("ascend_norm one none", "ascend_norm two asked", "ascend_norm one asked"),
]


@pytest.mark.parametrize(
    ("calls", "seen"),
    [
        (SOUND, []),
        (SOUND[:2] + SOUND[4:], ["ascend_layer is planned for"]),
        (SOUND[2:4] + SOUND[:2] + SOUND[4:], ["ascend_layer is planned for"]),
        (SOUND[:4], ["ascend_norm is planned for ['one', 'two'] and no plugin was called"]),
        (SOUND[:5], ["no plugin after 'one' was asked"]),
        ([*SOUND, "ascend_norm two asked"], ["'two' was asked as number 0"]),
        ([*SOUND, "ascend_mlp inner asked"], ["ascend_mlp was called and is not in the plan"]),
        ([*SOUND[:3], *SOUND[4:]], ["around one another; applied"]),
        ([SOUND[0], SOUND[2], *SOUND[4:]], ["around one another; applied: []"]),
        ([SOUND[0], SOUND[2], *SOUND], ["around one another; applied"]),
        ([*SOUND, "ascend_router one asked"], ["not in the plan", "should not come to it"]),
    ],
    ids=[
        *("sound", "one-left-out", "other-order", "nobody", "next-not-asked", "not-its-turn"),
        *("unplanned", "not-applied", "none-applied", "applied-once-of-twice", "not-reached"),
    ],
)
def test_deviations_from_the_plan_are_reported(calls: Sequence[str], seen: Sequence[str]) -> None:
    made = [Call(*call.split()) for call in calls]
    told = list(disagreements(PLAN, made, frozenset({"ascend_router"})))

    assert len(told) == len(seen)
    for sentence, part in zip(told, seen, strict=True):
        assert part in sentence


def test_hooks_are_known_to_be_out_of_reach_only_where_they_are() -> None:
    assert plan_activation.unreached(experts=True) & plan_activation.ONLY_WITH_EXPERTS == set()
    assert "ascend_mlp" not in plan_activation.unreached(experts=False)
