"""Every exception that leaves a plugin's hook names the plugin, its distribution and the hook."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from ascend_run.core.config.optimizer import optimizer_spec
from ascend_run.core.hook_errors import HookCall, error_line, hook_call_of
from ascend_run.core.hooks import Hooks
from ascend_run.core.rank.failures import describe_failure
from ascend_run.plugin_api import AscendRunError, DataError, HookError, OptimizerSpec
from ascend_run.registry.discovery import discover
from tests.support.fake_distributions import plugin_source
from tests.support.fake_plugins import plugin
from tests.support.installed import Install, offer
from tests.support.tiny_configs import config_with

MODULE = "the module tests.support.fake_plugins"


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("planted")


def raising(hook: str, function: Callable[..., Any] = lambda self: fail()) -> Any:
    return plugin("broken", {hook: function})()


CALLS: dict[str, tuple[Any, Callable[[Hooks], Any]]] = {
    "provider": (raising("ascend_norm"), lambda h: h.provide("ascend_norm")),
    "required provider": (raising("ascend_task"), lambda h: h.require("ascend_task")),
    "builder": (
        raising("ascend_data_parallel", lambda self: fail),
        lambda h: h.provide_builder("ascend_data_parallel")([]),
    ),
    "optimizer that is built": (
        raising(
            "ascend_optimizer",
            lambda self: OptimizerSpec(build=fail, states={}, element_wise=True),
        ),
        lambda h: optimizer_spec(config_with(), h).build([]),
    ),
    "optimizer of another type": (
        raising("ascend_optimizer", lambda self: fail),
        lambda h: optimizer_spec(config_with(), h),
    ),
    "wrapper": (raising("ascend_layer"), lambda h: h.wrap("ascend_layer", "x")),
    "wrapper applied": (
        raising("ascend_schedule", lambda self: fail),
        lambda h: h.wrap("ascend_schedule", "x"),
    ),
    "wrappers composed": (
        raising("ascend_batch", lambda self: fail),
        lambda h: h.composed("ascend_batch")("x"),
    ),
    "wrapper that returns None": (
        raising("ascend_model", lambda self: lambda inner: None),
        lambda h: h.wrap("ascend_model", "x"),
    ),
    "contribution": (raising("ascend_cost"), lambda h: [*h.contributions("ascend_cost")]),
    "merged": (raising("ascend_environment"), lambda h: h.merge("ascend_environment")),
    "merged of another type": (
        raising("ascend_metrics", lambda self: ["a list"]),
        lambda h: h.merge("ascend_metrics"),
    ),
    "collected": (raising("ascend_report"), lambda h: h.collect("ascend_report", str)),
    "collected of another type": (
        raising("ascend_empty_layers", lambda self: "a text"),
        lambda h: h.collect("ascend_empty_layers", str),
    ),
    "event": (
        raising("ascend_after_step"),
        lambda h: h.event("ascend_after_step")(context=None),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_an_exception_names_plugin_and_hook(kind: str) -> None:
    broken, call = CALLS[kind]
    (hook,) = (name for name in dir(broken) if name.startswith("ascend_"))
    with pytest.raises((ValueError, HookError)) as raised:
        call(Hooks([plugin("before")(), broken, plugin("behind")()]))

    assert hook_call_of(raised.value) == HookCall(hook, "broken", MODULE)
    assert f"raised by 'broken' of {MODULE} in {hook}" in "".join(
        traceback.format_exception(raised.value)
    )


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_of_an_event_names_the_listener_that_raised(at: int) -> None:
    def listener(number: int) -> Any:
        listen = (lambda self: fail()) if number == at else (lambda self, context: None)
        return plugin(f"listener-{number}", {"ascend_after_step": listen})()

    event = Hooks([listener(number) for number in range(3)]).event("ascend_after_step")
    with pytest.raises(ValueError, match="planted") as raised:
        event(context=None)
    assert hook_call_of(raised.value) == HookCall("ascend_after_step", f"listener-{at}", MODULE)


def test_every_failed_listener_is_named_at_the_end_of_a_run() -> None:
    listeners = [plugin(name, {"ascend_after_run": lambda self: fail()})() for name in "ab"]
    errors = Hooks(listeners).notify_all("ascend_after_run", context=None)
    assert [error_line(error) for error in errors] == [
        f"ValueError: planted; raised by '{name}' of {MODULE} in ascend_after_run" for name in "ab"
    ]


def test_the_distribution_of_an_installed_plugin_is_named(install: Install) -> None:
    source = plugin_source("ring") + (
        "\n    @hookimpl\n    def ascend_layer(self):\n        raise ValueError('planted')\n"
    )
    offer(install, "ring", source, version="3.1")
    ring = discover().load(["ring"])["ring"]
    with pytest.raises(ValueError, match="planted") as raised:
        Hooks([ring(ring.config_class())]).wrap("ascend_layer", "x")
    assert hook_call_of(raised.value) == HookCall("ascend_layer", "ring", "ascend-run-ring 3.1")


def test_a_plugin_of_ours_has_our_distribution() -> None:
    cpu = discover().load(["cpu"])["cpu"]
    hooks = Hooks([cpu(cpu.config_class())])
    with pytest.raises(TypeError) as raised:
        hooks.merge("ascend_environment", config=None, local_world_size=None)
    call = hook_call_of(raised.value)
    assert call is not None
    assert (call.plugin, call.distribution) == ("cpu", "ascend-run 0.1.0")


def test_a_user_error_keeps_its_meaning_and_gets_the_name() -> None:
    def refuse(self: Any) -> Any:
        raise DataError("no rows", ["file x is empty"])

    with pytest.raises(AscendRunError) as raised:
        Hooks([raising("ascend_task", refuse)]).require("ascend_task")
    assert (type(raised.value), raised.value.exit_code) == (DataError, 2)
    assert raised.value.problems == ("file x is empty",)
    note = f"raised by 'broken' of {MODULE} in ascend_task"
    assert str(raised.value) == f"no rows:\n  file x is empty\n  {note}"
    assert error_line(raised.value) == f"DataError: {raised.value}"


def test_the_innermost_of_nested_calls_is_named() -> None:
    inner = Hooks([plugin("inner", {"ascend_norm": lambda self: fail()})()])
    outer = plugin("outer", {"ascend_task": lambda self: inner.provide("ascend_norm")})()
    with pytest.raises(ValueError, match="planted") as raised:
        Hooks([outer]).require("ascend_task")
    assert raised.value.__notes__ == [f"raised by 'inner' of {MODULE} in ascend_norm"]


def test_an_exception_that_refuses_attributes_is_named() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            if name != "__notes__":
                raise TypeError(name)

    def refuse(self: Any) -> Any:
        raise Frozen

    with pytest.raises(Frozen) as raised:
        Hooks([raising("ascend_norm", refuse)]).provide("ascend_norm")
    assert hook_call_of(raised.value) is not None


@pytest.mark.parametrize(
    ("error", "summary"),
    [(ValueError("planted"), "ValueError: planted"), (DataError("no rows"), "no rows")],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_reports_the_name_in_its_summary(error: Exception, summary: str) -> None:
    def refuse(self: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        Hooks([raising("ascend_norm", refuse)]).provide("ascend_norm")
    failure = describe_failure(error, rank=0, phase="run")
    note = f"raised by 'broken' of {MODULE} in ascend_norm"
    assert failure.summary == f"{summary}; {note}"
    assert note in failure.text
