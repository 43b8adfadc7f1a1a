"""Hooks combine answers by kind, in resolved order, and compile events to plain calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pluggy
import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import HookError, HookKind, Manifest, hookimpl
from ascend_run.plugin_api.hookspecs import hook_points


class Base:
    def __init__(self, name: str) -> None:
        self.manifest = Manifest(name=name, summary="for a test")
        self.seen: list[Any] = []


class Norm(Base):
    @hookimpl
    def ascend_norm(self) -> str:
        return self.manifest.name


class PlatformNorm(Norm):
    @hookimpl
    def ascend_device(self) -> None: ...


class NoNorm(Base):
    @hookimpl
    def ascend_norm(self) -> None:
        return None


class Layer(Base):
    @hookimpl
    def ascend_layer(self, layer_index: int) -> Any:
        return lambda inner: f"{self.manifest.name}{layer_index}({inner})"


class Groups(Base):
    @hookimpl
    def ascend_process_groups(self) -> Mapping[str, Sequence[Sequence[int]]]:
        return {"ring": [[0]]}


class Listener(Base):
    @hookimpl
    def ascend_after_log(self, metrics: Mapping[str, float]) -> None:
        self.seen.append(dict(metrics))


class Listener2(Base):
    @hookimpl
    def ascend_after_log(self, metrics: Mapping[str, float], context: Any) -> None:
        self.seen.append((context, dict(metrics)))


def test_what_every_object_has_is_not_searched_for_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of what an object has, and each look at it takes microseconds."""
    seen: list[str] = []
    look = pluggy.PluginManager.parse_hookimpl_opts

    def recorded(manager: Any, plugin: Any, name: str) -> Any:
        seen.append(name)
        return look(manager, plugin, name)

    monkeypatch.setattr(pluggy.PluginManager, "parse_hookimpl_opts", recorded)
    assert Hooks([Norm("norm")]).provide("ascend_norm") == "norm"
    assert sorted(seen) == ["ascend_norm", "manifest", "seen"]


def test_a_provider_is_the_first_plugin_with_a_result_platform_last() -> None:
    platform = PlatformNorm("platform")
    assert Hooks([platform]).provide("ascend_norm", config=None) == "platform"
    assert Hooks([platform, Norm("feature")]).provide("ascend_norm", config=None) == "feature"
    assert Hooks([NoNorm("idle"), platform]).provide("ascend_norm", config=None) == "platform"


def test_a_provider_without_a_result_is_none_or_an_error_if_required() -> None:
    assert Hooks([NoNorm("idle")]).provide("ascend_norm", config=None) is None
    with pytest.raises(HookError, match="no enabled plugin provides ascend_norm"):
        Hooks([]).require("ascend_norm", config=None)


def test_wrappers_apply_in_resolved_order_innermost_first() -> None:
    hooks = Hooks([Layer("a"), Layer("b"), Layer("c")])
    wrapped = hooks.wrap("ascend_layer", "x", config=None, device=None, layer_index=3, num_layers=4)
    assert wrapped == "c3(b3(a3(x)))"


def test_a_wrapper_that_returns_none_is_an_error() -> None:
    class Broken(Base):
        @hookimpl
        def ascend_layer(self) -> Any:
            return lambda inner: None

    with pytest.raises(HookError, match="returned None"):
        Hooks([Broken("broken")]).wrap(
            "ascend_layer", "x", config=None, device=None, layer_index=0, num_layers=1
        )


def test_inputs_and_results_of_each_wrapping_step_can_be_observed() -> None:
    seen: list[Any] = []
    hooks = Hooks([Layer("a"), Layer("b")])
    hooks.wrap("ascend_layer", "x", lambda *step: seen.append(step), layer_index=0)
    assert seen == [("a", "x", "a0(x)"), ("b", "a0(x)", "b0(a0(x))")]


def test_a_merged_list_rejects_what_two_plugins_give() -> None:
    class Panels(Base):
        @hookimpl
        def ascend_report(self) -> list[str]:
            return ["loss", self.manifest.name]

    assert Hooks([Panels("a")]).collect("ascend_report", str) == ["loss", "a"]
    with pytest.raises(HookError, match="'a' and 'b' both give 'loss'"):
        Hooks([Panels("a"), Panels("b")]).collect("ascend_report", str)


def test_contributions_merge_and_a_key_given_twice_names_both_plugins() -> None:
    assert Hooks([Groups("a")]).merge("ascend_process_groups", config=None, layout=None) == {
        "ring": [[0]]
    }
    with pytest.raises(HookError, match="'a' and 'b' both give 'ring'"):
        Hooks([Groups("a"), Groups("b")]).merge("ascend_process_groups", config=None, layout=None)


def test_an_event_calls_each_listener_once_with_its_own_arguments() -> None:
    first, second = Listener("first"), Listener2("second")
    Hooks([first, second]).event("ascend_after_log")(context="c", metrics={"loss": 1.0})
    assert first.seen == [{"loss": 1.0}]
    assert second.seen == [("c", {"loss": 1.0})]


def test_an_event_calls_nothing_but_its_listeners() -> None:
    """The cost of an event is counted: one call a listener, none without listeners."""

    class Silent(Base):
        @hookimpl
        def ascend_after_log(self) -> None: ...

    def calls(event: Any) -> int:
        made: list[str] = []
        sys.setprofile(lambda frame, kind, argument: made.append(kind))
        try:
            event(context=None, metrics={})
        finally:
            sys.setprofile(None)
        of_the_test = 2  # of the event itself, and of setprofile
        return made.count("call") + made.count("c_call") - of_the_test

    assert calls(Hooks([]).event("ascend_after_log")) == 0
    assert calls(Hooks([Silent(f"l{i}") for i in range(20)]).event("ascend_after_log")) == 20


def test_a_hook_implementation_that_no_specification_knows_is_refused() -> None:
    class Misspelt(Base):
        @hookimpl
        def ascend_layers(self) -> None: ...

    with pytest.raises(HookError, match="does not exist"):
        Hooks([Misspelt("misspelt")])


def test_every_hook_has_a_kind_and_a_contract() -> None:
    from ascend_run.plugin_api import hookspecs

    points = hook_points()
    assert len(points) > 30
    assert {point.kind for point in points.values()} == set(HookKind)
    for name in points:
        assert getattr(hookspecs, name).__doc__, name
