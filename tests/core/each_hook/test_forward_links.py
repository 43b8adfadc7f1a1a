"""Links that wrappers return: their order, what is refused, and the runs around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ascend_run.plugin_api import ForwardLink, HookError, LinkPlace
from ascend_run.types.forward import chain_of
from tests.support.fake_plugins import plugin
from tests.support.marking import marking_link
from tests.support.probed_runs import built, probe, train

from .test_modules import LAYERS, OUTERMOST_FIRST, pair

IDENTITY = ForwardLink(wrap=lambda inner: inner, compilable=True)


def linking(name: str, hooks: dict[str, Any], **links: LinkPlace) -> Any:
    """A plugin of several hooks, which may link the modules that are named."""
    return plugin(name, hooks, forward_links=links)()


def test_links_stand_in_the_resolved_order_whichever_hook_gave_them(tmp_path: Path) -> None:
    """The first plugin links the attention from the layer's hook, which comes after its own."""
    marks: list[Any] = []
    of_layer = {"self_attention": marking_link(marks, "first")(nn.Identity())}
    first = {"ascend_layer": lambda self: lambda layer: of_layer}
    second = {"ascend_self_attention": lambda self: marking_link(marks, "second")}
    probes = [
        linking(name, hooks, self_attention=LinkPlace.AROUND)
        for name, hooks in (("first", first), ("second", second))
    ]
    run = train(tmp_path, *probes)
    assert chain_of(run.model.decoder.layers[0].self_attention).names == ("first", "second")
    assert marks == ["second", "first"] * len(LAYERS)


def test_links_reach_the_model_that_is_trained_and_leave_its_names(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    linked = train(tmp_path / "linked", *pair("ascend_layer", []))
    assert [*linked.model.state_dict()] == [*plain.model.state_dict()]
    assert all(torch.equal(linked.weights[name], weight) for name, weight in plain.weights.items())


def returning(links: Any) -> Any:
    return probe("ascend_layer", lambda self: lambda layer: links)


@pytest.mark.parametrize(
    ("links", "told"),
    [
        ({"mlp": IDENTITY}, r"'probe' links the forward of a mlp, which its manifest does not"),
        ({"mlp.linear_fc1": IDENTITY}, r'forward_links=\{"linear": LinkPlace.AROUND\}'),
        ({"mpl": IDENTITY}, "links the forward of 'mpl', which is not a module there"),
        (None, "'probe' returned None instead of a wrapped object"),
        (ForwardLink(wrap=lambda inner: None, compilable=True),  # type: ignore[arg-type,return-value]
         "'probe' wraps a forward in None"),
    ],
    ids=["undeclared", "linear", "unknown", "none", "no function"],
)  # fmt: skip
def test_links_that_cannot_be_installed_are_refused(tmp_path: Path, links: Any, told: str) -> None:
    with pytest.raises(HookError, match=told), built(tmp_path, returning(links)):
        raise AssertionError("it was built all the same")


@pytest.mark.parametrize(("name", "shown"), [("", "what it wraps"), ("linear_fc1", "linear_fc1")])
def test_a_wrapper_that_assigns_a_forward_is_refused(tmp_path: Path, name: str, shown: str) -> None:
    def assign(module: nn.Module) -> nn.Module:
        module.get_submodule(name).forward = lambda *args: args[0]  # type: ignore[method-assign]
        return module

    told = f"ascend_mlp: 'probe' assigned the forward of {shown}; return a ForwardLink"
    with (
        pytest.raises(HookError, match=told),
        built(tmp_path, probe("ascend_mlp", lambda self: assign)),
    ):
        raise AssertionError("it was built all the same")


def test_a_token_dispatcher_has_no_forward_to_link(tmp_path: Path) -> None:
    given = probe("ascend_token_dispatcher", lambda self: lambda dispatcher: IDENTITY)
    problem = "'what it wraps', which is not a module there; expected one"
    with (
        pytest.raises(HookError, match=problem),
        built(tmp_path, given, model="moe"),
    ):
        raise AssertionError("it was built all the same")


def test_a_linked_module_is_recomputed_with_its_links(tmp_path: Path) -> None:
    """By Megatron's checkpoint, which calls the module."""
    marks: list[Any] = []
    probes = pair("ascend_mlp", marks)
    values = {"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]}
    recomputed = train(tmp_path / "recomputed", *probes, values=values)
    backward = [(name, layer) for layer in reversed(LAYERS) for name in ("outer", "inner")]
    assert marks == OUTERMOST_FIRST + backward
    plain = train(tmp_path / "plain").weights
    assert all(torch.equal(recomputed.weights[name], weight) for name, weight in plain.items())


def test_the_platforms_matmul_is_the_innermost_link_of_linears(tmp_path: Path) -> None:
    wide = {"train.precision": "bf16", "plugins.cpu.bf16_matmul_dtype": "fp32"}
    linear = linking(
        "outer", {"ascend_linear": lambda self: lambda module: IDENTITY}, linear=LinkPlace.OWN
    )
    with built(tmp_path, linear, values=wide) as (_, context):
        modules = dict(context.models["policy"].chunks[0].named_modules())
        (name,) = (name for name in modules if name.endswith("layers.0.mlp.linear_fc1"))
        assert chain_of(modules[name]).names == ("platform", "outer")
