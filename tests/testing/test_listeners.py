"""Listeners are counted, put back afterwards, and an error in one must name the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Manifest, hookimpl
from ascend_run.testing.listeners import MESSAGE, unnamed_errors, watched_listeners


class Base:
    manifest = Manifest(name="listens", summary="made for a test")

    @hookimpl
    def ascend_before_step(self, context: Any) -> None:
        """Inherited by what follows."""


class Listens(Base):
    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def ascend_after_step(self, context: Any) -> None:
        self.seen.append(context)

    @staticmethod
    @hookimpl
    def ascend_before_run(context: Any) -> None:
        """Without the instance."""

    @hookimpl(specname="ascend_after_run")
    def close(self) -> None:
        """By another name."""

    def ascend_after_log(self) -> None:
        """Not marked."""


def notify(hooks: Hooks, name: str) -> None:
    more = {"ascend_after_log": {"metrics": {}}}
    hooks.event(name)(context=name, **more.get(name, {}))


def test_calls_are_counted_by_method() -> None:
    with watched_listeners(Listens) as listeners:
        plugin = Listens()
        hooks = Hooks([plugin])
        for hook in listeners.hooks.values():
            notify(hooks, hook)
        notify(hooks, "ascend_after_step")

    assert listeners.calls == {
        "ascend_after_log": 0,
        "ascend_after_step": 2,
        "ascend_before_run": 1,
        "ascend_before_step": 1,
        "close": 1,
    }
    assert plugin.seen == ["ascend_after_step"] * 2


def test_the_class_is_as_before_afterwards() -> None:
    before = dict(vars(Listens))
    with watched_listeners(Listens):
        assert dict(vars(Listens)) != before
    assert dict(vars(Listens)) == before
    assert "ascend_before_step" not in vars(Listens)


def test_an_error_is_raised_in_each_called_listener() -> None:
    with watched_listeners(Listens) as listeners:
        hooks = Hooks([Listens()])
        for hook in listeners.hooks.values():
            notify(hooks, hook)
        assert [*unnamed_errors(listeners, "listens", lambda name: notify(hooks, name))] == []
        # The name of another plugin, and a kernel that swallows errors.
        wanted = ["ascend_after_step", "ascend_before_run", "ascend_before_step", "close"]
        assert [*unnamed_errors(listeners, "other", lambda name: notify(hooks, name))] == wanted
        assert [*unnamed_errors(listeners, "listens", lambda name: None)] == wanted
        listeners.raises = "ascend_after_step"
        with pytest.raises(RuntimeError, match=MESSAGE):
            notify(hooks, "ascend_after_step")
