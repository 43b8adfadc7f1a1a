from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ascend_run.plugin_api import Claim, Condition, HookError, LinkPlace, hookimpl, hookspecs
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.plan.explanation import (
    ForwardLinks,
    HookOwners,
    explain_forwards,
    explain_hooks,
    explain_plugin,
    idle,
)
from ascend_run.registry.hooks import check_hooks
from ascend_run.registry.resolution import resolve
from tests.support.fake_plugins import named, platform, plugin


def result(self: object) -> None:
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
        check_hooks([plugin("ring", {"ascend_atention": result})])

    assert refused.value.problems == (
        "'ring' implements ascend_atention, which is not a hook; did you mean ascend_attention?",
    )


@pytest.mark.parametrize("hooks", [{"ascend_experts": result}, {}], ids=["repeated", "unmade"])
def test_a_claim_that_a_hook_makes_is_refused_in_the_manifest(hooks: dict[str, Any]) -> None:
    claims = (Claim.EXPERTS, Claim.LINEAR_COMM)
    with pytest.raises(HookError) as refused:
        check_hooks([plugin("ring", hooks, claims=claims)])

    (problem,) = refused.value.problems
    assert problem == (
        "'ring' has Claim.EXPERTS in its manifest; only implementing ascend_experts makes the "
        "claim 'experts': delete it from the manifest's claims"
    )
    check_hooks([plugin("ring", hooks, claims=(Claim.LINEAR_COMM,))])


def test_an_unknown_hook_argument_is_rejected_with_the_known_ones() -> None:
    def ascend_process_groups(self: object, layer: int) -> None: ...

    with pytest.raises(HookError) as refused:
        check_hooks([plugin("ring", {"ascend_process_groups": ascend_process_groups})])

    assert refused.value.problems == (
        (
            "'ring' implements ascend_process_groups with the argument 'layer'; its arguments are: "
            "config, layout"
        ),
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
        check_hooks([plugin("a", {"ascend_x": result}), plugin("b", {"ascend_y": result})])

    assert len(refused.value.problems) == 2


def test_a_provider_lists_its_claimant_and_then_the_platform() -> None:
    hooks = {"ascend_attention_kernel": result}

    found = explained(
        platform("cpu", hooks),
        plugin("z-kernel", hooks, after=("cpu",)),
    )["ascend_attention_kernel"]

    assert found.owners == ("z-kernel", "cpu")
    assert found.why == "z-kernel: claims attention-kernel; else cpu: the platform's default"


def test_a_wrapper_lists_its_plugins_innermost_first_with_reasons() -> None:
    """Each position in the order has its reason."""
    hooks = {"ascend_layer": result}

    found = explained(
        plugin("a", hooks, after=("z",)),
        plugin("m", hooks),
        plugin("z", hooks),
        plugin("b", hooks, requires=("a",)),
    )["ascend_layer"]

    assert found.owners == ("m", "z", "a", "b")
    assert found.why == (
        "innermost first; m, z: no declared order, sorted by name; a is declared to be after z; "
        "b requires a"
    )


def test_an_order_that_follows_from_others_names_them() -> None:
    hooks = {"ascend_layer": result}

    found = explained(
        plugin("a", hooks, after=("m",)), plugin("m", after=("z",)), plugin("z", hooks)
    )["ascend_layer"]

    assert found.why == "innermost first; a comes after z through m"


def test_an_order_by_seam_names_the_claim_and_its_owner() -> None:
    hooks = {"ascend_attention": result}
    inner = plugin("z-swap", hooks, inside=(Claim.CONTEXT_PARALLEL,))
    outer = plugin("a-probe", hooks, outside=(Claim.CONTEXT_PARALLEL,))
    owner = plugin("ring", {**hooks, "ascend_sequence_partition": result})
    classes = named(inner, outer, owner)

    assert explained(inner, outer, owner)["ascend_attention"].why == (
        "innermost first; z-swap is declared to be inside of context-parallel, which ring owns; "
        "a-probe is declared to be outside of context-parallel, which ring owns"
    )
    assert explain_plugin(inner, resolve([*classes], classes)) == (
        "enabled by name; z-swap is declared to be inside of context-parallel, which ring owns"
    )


def test_an_order_relative_to_an_own_claim_is_refused() -> None:
    itself = plugin("swap", claims=(Claim.LINEAR_COMM,), outside=(Claim.LINEAR_COMM,))

    with pytest.raises(HookError, match=r"'swap' is declared .* Claim\.LINEAR_COMM, which it"):
        check_hooks([itself])


def test_one_owner_needs_no_reason_of_order() -> None:
    assert explained(plugin("a", {"ascend_layer": result}))["ascend_layer"].why == (
        "the only implementation"
    )


def test_kinds_have_their_locations() -> None:
    hooks = {"ascend_configure": result}

    found = explained(
        platform("cpu", hooks),
        plugin("z-family", {**hooks, "ascend_model_family": result}),
        plugin("a", hooks),
    )["ascend_configure"]

    assert found.owners == ("z-family", "a", "cpu")
    assert "a: a feature comes after a model family" in found.why


def test_each_plugin_says_why_it_is_there_and_where() -> None:
    ring = plugin("ring", after=("gmm",), requires=("base",))
    classes = named(ring, plugin("gmm"), plugin("base"), cpu := platform("cpu"))
    resolution = resolve([*classes], classes)

    assert explain_plugin(ring, resolution) == (
        "enabled by name; ring is declared to be after gmm; ring requires base"
    )
    assert explain_plugin(cpu, resolution) == (
        "the platform of the run (--platform); the default of every provider hook, called last"
    )
    assert explain_plugin(classes["gmm"], resolution) == (
        "enabled by name; ring is declared to be after gmm"
    )
    classes = named(plugin("a"), plugin("b"))
    assert explain_plugin(classes["a"], resolve([*classes], classes)) == (
        "enabled by name; no declared order: sorted by name"
    )


def test_idle_plugins_are_named_with_their_condition() -> None:
    classes = named(plugin("ulysses", idle=Condition("parallel.cp", "<=", 1)), plugin("gmm"))
    resolution = resolve([*classes], classes)

    assert idle(resolution, SimpleNamespace(parallel=SimpleNamespace(cp=1))) == {
        "ulysses": "parallel.cp <= 1"
    }
    assert idle(resolution, SimpleNamespace(parallel=SimpleNamespace(cp=2))) == {}


def test_chains_are_shown_as_they_are_installed() -> None:
    """What computes in place of a module's own forward is further in than all others."""
    manifests = [
        plugin("adapters", forward_links={"linear": LinkPlace.AROUND}),
        plugin("graphs", forward_links={"linear": LinkPlace.COMPILER, "layer": LinkPlace.COMPILER}),
        plugin("plain"),
        plugin("product", forward_links={"linear": LinkPlace.OWN}),
        plugin("swap", forward_links={"linear": LinkPlace.AROUND, "mlp": LinkPlace.AROUND}),
    ]
    found = explain_forwards([each.manifest for each in manifests])  # type: ignore[attr-defined]
    assert found == (
        ForwardLinks("layer", (), ("graphs",)),
        ForwardLinks("linear", ("product", "adapters", "swap"), ("graphs",)),
        ForwardLinks("mlp", ("swap",), ()),
    )
