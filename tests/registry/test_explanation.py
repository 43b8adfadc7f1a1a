from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ascend_run.plugin_api import Claim, Condition, HookError, hookimpl, hookspecs
from ascend_run.plugin_api.hook_points import hook_points
from ascend_run.registry.explanation import (
    HookOwners,
    check_hooks,
    explain_hooks,
    explain_plugin,
    idle,
)
from ascend_run.registry.hooks import implementations
from ascend_run.registry.resolution import resolve
from tests.support.fake_plugins import named, platform, plugin


def answer(self: object) -> None:
    """A hook implementation that asks for nothing."""


def explained(*plugins: type) -> dict[str, HookOwners]:
    classes = named(*plugins)
    return {found.hook: found for found in explain_hooks(resolve([*classes], classes))}


def test_every_hook_of_the_api_is_known_with_its_arguments() -> None:
    points = hook_points()

    declared = {name for name in vars(hookspecs) if name.startswith("ascend_")}
    assert {*points} == declared
    assert points["ascend_process_groups"].arguments == ("config", "layout")


def test_hooks_are_read_from_the_class_in_every_form_of_method() -> None:
    class Base:
        @hookimpl
        def ascend_layer(self, layer_index: int) -> None: ...

        @staticmethod
        @hookimpl
        def ascend_model(role: str) -> None: ...

        @classmethod
        @hookimpl
        def ascend_mlp(cls, config: Any) -> None: ...

        @hookimpl(specname="ascend_batch")
        def cut(self, config: Any) -> None: ...

        def ascend_router(self) -> None: ...

    class Plugin(Base):
        manifest = plugin("p").manifest  # type: ignore[attr-defined]

        def __init__(self) -> None:
            raise AssertionError("explaining makes no instance")

    found = implementations(Plugin)

    assert {hook: implementation.arguments for hook, implementation in found.items()} == {
        "ascend_layer": ("layer_index",),
        "ascend_model": ("role",),
        "ascend_mlp": ("config",),
        "ascend_batch": ("config",),
    }
    check_hooks([Plugin])


def test_a_misspelt_hook_is_refused_with_the_nearest() -> None:
    with pytest.raises(HookError) as refused:
        check_hooks([plugin("ring", {"ascend_atention": answer})])

    assert refused.value.problems == (
        "'ring' implements ascend_atention, which is no hook; did you mean ascend_attention?",
    )


def test_an_answer_for_a_seam_that_the_manifest_does_not_claim_is_refused() -> None:
    with pytest.raises(HookError) as refused:
        check_hooks([plugin("ring", {"ascend_experts": answer}, claims=(Claim.ROUTER,))])

    (problem,) = refused.value.problems
    assert problem.startswith("'ring' answers ascend_experts without claiming 'experts'; add")
    check_hooks([plugin("ring", {"ascend_experts": answer}, claims=(Claim.EXPERTS,))])


def test_the_platform_answers_as_the_default_without_the_claim_and_a_feature_is_no_platform() -> (
    None
):
    hooks = {"ascend_attention_kernel": answer, "ascend_device": answer}
    check_hooks([platform("cpu", hooks)])

    with pytest.raises(HookError, match=r"Claim\.PLATFORM"):
        check_hooks([plugin("ring", hooks, claims=(Claim.ATTENTION_KERNEL,))])


def test_an_argument_that_a_hook_does_not_have_is_refused_with_those_it_has() -> None:
    def ascend_process_groups(self: object, layer: int) -> None: ...

    with pytest.raises(HookError) as refused:
        check_hooks([plugin("ring", {"ascend_process_groups": ascend_process_groups})])

    assert refused.value.problems == (
        "'ring' asks ascend_process_groups for 'layer'; its arguments are: config, layout",
    )


@pytest.mark.parametrize("option", ["tryfirst", "trylast", "hookwrapper", "wrapper"])
def test_an_order_beside_the_declared_one_is_refused(option: str) -> None:
    class Plugin:
        manifest = plugin("ring").manifest  # type: ignore[attr-defined]

        @hookimpl(**{option: True})
        def ascend_layer(self) -> Any:
            yield

    with pytest.raises(HookError, match=option):
        check_hooks([Plugin])


def test_all_bad_hooks_of_all_plugins_are_in_one_refusal() -> None:
    with pytest.raises(HookError) as refused:
        check_hooks([plugin("a", {"ascend_x": answer}), plugin("b", {"ascend_y": answer})])

    assert len(refused.value.problems) == 2


def test_a_provider_lists_its_claimant_and_then_the_platform() -> None:
    hooks = {"ascend_attention_kernel": answer}

    found = explained(
        platform("cpu", hooks),
        plugin("z-kernel", hooks, claims=(Claim.ATTENTION_KERNEL,), after=("cpu",)),
    )["ascend_attention_kernel"]

    assert found.owners == ("z-kernel", "cpu")
    assert found.why == "z-kernel: claims attention-kernel; else cpu: the platform's default"


def test_a_wrapper_lists_its_plugins_innermost_first_with_the_reason_of_each_place() -> None:
    hooks = {"ascend_layer": answer}

    found = explained(
        plugin("a", hooks, after=("z",)),
        plugin("m", hooks),
        plugin("z", hooks),
        plugin("b", hooks, requires=("a",)),
    )["ascend_layer"]

    assert found.owners == ("m", "z", "a", "b")
    assert found.why == (
        "innermost first; m, z: no order declared, by name; a declares to be after z; b requires a"
    )


def test_an_order_that_follows_from_others_names_them() -> None:
    hooks = {"ascend_layer": answer}

    found = explained(
        plugin("a", hooks, after=("m",)), plugin("m", after=("z",)), plugin("z", hooks)
    )["ascend_layer"]

    assert found.why == "innermost first; a comes after z by way of m"


def test_one_owner_needs_no_reason_of_order() -> None:
    assert explained(plugin("a", {"ascend_layer": answer}))["ascend_layer"].why == (
        "only one implements it"
    )


def test_kinds_have_their_places() -> None:
    hooks = {"ascend_configure": answer}

    found = explained(
        platform("cpu", hooks),
        plugin("z-family", hooks, claims=(Claim.MODEL_FAMILY,)),
        plugin("a", hooks),
    )["ascend_configure"]

    assert found.owners == ("z-family", "a", "cpu")
    assert "a: a feature comes after a model family" in found.why


def test_each_plugin_says_why_it_is_there_and_where() -> None:
    ring = plugin("ring", after=("gmm",), requires=("base",))
    classes = named(ring, plugin("gmm"), plugin("base"), cpu := platform("cpu"))
    resolution = resolve([*classes], classes)

    assert explain_plugin(ring, resolution) == (
        "enabled by name; outside of others as it declares: requires base, after gmm"
    )
    assert explain_plugin(cpu, resolution) == (
        "the platform of the run (--platform); asked last by every provider, as the default"
    )
    assert explain_plugin(classes["gmm"], resolution) == (
        "enabled by name; declares no order: by name"
    )


def test_plugins_that_change_nothing_in_this_run_are_named_with_the_condition() -> None:
    classes = named(plugin("ulysses", idle=Condition("parallel.cp", "<=", 1)), plugin("gmm"))
    resolution = resolve([*classes], classes)

    assert idle(resolution, SimpleNamespace(parallel=SimpleNamespace(cp=1))) == {
        "ulysses": "parallel.cp <= 1"
    }
    assert idle(resolution, SimpleNamespace(parallel=SimpleNamespace(cp=2))) == {}
