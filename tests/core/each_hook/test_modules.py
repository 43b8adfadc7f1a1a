"""The wrappers of modules: called with what their contracts say, and inside the model that runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ascend_run.plugin_api import ForwardLink, HookError
from ascend_run.types.forward import chain_of
from tests.support.marking import Passing, marking_link
from tests.support.probed_runs import built, probe, train

LAYERS = (0, 1)


def pair(hook: str, marks: list[Any]) -> tuple[Any, Any]:
    """Two plugins on a hook of one layer; each marks its name and the layer."""

    def of(name: str) -> Any:
        def wrap(self: Any, layer_index: int) -> Any:
            return marking_link(marks, (name, layer_index))

        return probe(hook, wrap, name)

    return of("inner"), of("outer")


OUTERMOST_FIRST = [(name, layer) for layer in LAYERS for name in ("outer", "inner")]


def test_ascend_linear_wraps_each_linear_once_innermost_plugin_first(
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, int]] = []
    ran: list[tuple[str, str, int]] = []

    def of(plugin: str) -> Any:
        def wrap(self: Any, device: Any, name: str, layer_index: int) -> Any:
            assert device.name == "cpu"
            asked.append((name, layer_index))
            return marking_link(ran, (plugin, name, layer_index))

        return probe("ascend_linear", wrap, plugin)

    train(tmp_path, of("inner"), of("outer"))

    linears = [
        (name, layer)
        for layer in LAYERS
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ]
    assert sorted(asked) == sorted(2 * linears)
    assert ran == [(plugin, *linear) for linear in linears for plugin in ("outer", "inner")]


def test_ascend_embedding_wraps_the_embedding(tmp_path: Path) -> None:
    marks: list[Any] = []
    run = train(
        tmp_path, probe("ascend_embedding", lambda self, device: marking_link(marks, device.name))
    )
    assert marks == ["cpu"]
    assert chain_of(run.model.embedding).names == ("probe",)


def test_ascend_self_attention_wraps_each_layers_attention(tmp_path: Path) -> None:
    marks: list[Any] = []
    run = train(tmp_path, *pair("ascend_self_attention", marks))
    assert marks == OUTERMOST_FIRST
    for layer in run.model.decoder.layers:
        assert chain_of(layer.self_attention).names == ("inner", "outer")


def test_ascend_mlp_wraps_dense_layers_and_no_experts(tmp_path: Path) -> None:
    marks: list[Any] = []
    train(tmp_path, *pair("ascend_mlp", marks))
    assert marks == OUTERMOST_FIRST
    with built(tmp_path, *pair("ascend_mlp", []), model="moe") as (_, context):
        layers = context.models["policy"].chunks[0].module.decoder.layers
        assert not any(chain_of(layer.mlp).names for layer in layers)


def test_ascend_moe_layer_wraps_experts_and_no_dense_layer(tmp_path: Path) -> None:
    marks: list[Any] = []
    train(tmp_path, *pair("ascend_moe_layer", marks), model="moe")
    assert marks == OUTERMOST_FIRST
    with built(tmp_path, *pair("ascend_moe_layer", [])) as (_, context):
        layers = context.models["policy"].chunks[0].module.decoder.layers
        assert not any(chain_of(layer.mlp).names for layer in layers)


def test_ascend_token_dispatcher_wraps_each_layers_dispatcher(tmp_path: Path) -> None:
    marks: list[Any] = []

    class Counting(Passing):
        def __init__(self, inner: Any, mark: Any) -> None:
            super().__init__(inner)
            self.mark = mark

        def token_dispatch(self, *args: Any, **kwargs: Any) -> Any:
            marks.append(self.mark)
            return self.inner.token_dispatch(*args, **kwargs)

    def of(name: str) -> Any:
        def wrap(self: Any, layer_index: int) -> Any:
            return lambda inner: Counting(inner, (name, layer_index))

        return probe("ascend_token_dispatcher", wrap, name)

    train(tmp_path, of("inner"), of("outer"), model="moe")
    assert marks == OUTERMOST_FIRST


def test_a_token_dispatcher_may_call_the_experts_itself(tmp_path: Path) -> None:
    """Instead of the stages before and after them; the weights become those of the stages."""
    computed: list[int] = []

    class Computing(Passing):
        def compute_experts(self, experts: nn.Module, rows: Any, probs: Any) -> Any:
            tokens, counts, shares = self.inner.dispatch_postprocess(rows, probs)
            computed.append(len(tokens))
            return self.inner.combine_preprocess(experts(tokens, counts, shares)[0])

        def dispatch_postprocess(self, *_: Any) -> Any:
            raise AssertionError("called by the layer")

        combine_preprocess = dispatch_postprocess

    dispatcher = probe("ascend_token_dispatcher", lambda self: Computing)
    weights = []
    for name, probes in (("plain", ()), ("own", (dispatcher,))):
        (folder := tmp_path / name).mkdir()
        weights.append(train(folder, *probes, model="moe").weights)
    assert computed
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_ascend_layer_wraps_each_layer_and_knows_how_many_there_are(tmp_path: Path) -> None:
    marks: list[Any] = []

    def wrap(self: Any, layer_index: int, num_layers: int) -> Any:
        return marking_link(marks, (layer_index, num_layers))

    train(tmp_path, probe("ascend_layer", wrap))
    assert marks == [(0, 2), (1, 2)]


def test_ascend_layer_may_leave_a_layer_alone(tmp_path: Path) -> None:
    marks: list[Any] = []

    def wrap(self: Any, layer_index: int) -> Any:
        return marking_link(marks, layer_index) if layer_index == 1 else None

    run = train(tmp_path, probe("ascend_layer", wrap))
    assert marks == [1]
    assert [chain_of(layer).names for layer in run.model.decoder.layers] == [(), ("probe",)]


def test_ascend_output_layer_wraps_the_projection_used_by_the_loss(
    tmp_path: Path,
) -> None:
    def flat(inner: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, bias = inner(*args, **kwargs)
            return logits * 0.0, bias

        return forward

    link = ForwardLink(wrap=flat, compilable=True)
    run = train(tmp_path, probe("ascend_output_layer", lambda self: lambda module: link))
    assert run.readings()[0]["loss"] == pytest.approx(math.log(90), rel=1e-6)


def test_ascend_model_wraps_the_model_of_a_role_outside_its_modules(
    tmp_path: Path,
) -> None:
    marks: list[Any] = []

    def wrap(self: Any, device: Any, role: str) -> Any:
        return marking_link(marks, (role, device.name))

    layer = probe(
        "ascend_layer", lambda self, layer_index: marking_link(marks, layer_index), "layer"
    )
    run = train(tmp_path, probe("ascend_model", wrap), layer)
    assert marks == [("policy", "cpu"), 0, 1]
    assert chain_of(run.model).names == ("probe",)


def test_ascend_empty_layers_leave_slots_without_a_layer(tmp_path: Path) -> None:
    def empty(self: Any, config: Any) -> list[int]:
        return [config.model.num_layers - 1]

    run = train(tmp_path, probe("ascend_empty_layers", empty), values={"model.num_layers": 3})
    plain = train(tmp_path / "plain", values={"model.num_layers": 2})
    assert [len([*layer.parameters()]) for layer in run.model.decoder.layers][-1] == 0
    assert all(torch.equal(run.weights[name], weight) for name, weight in plain.weights.items())


def test_ascend_empty_layers_named_by_two_plugins_are_refused_by_name(tmp_path: Path) -> None:
    probes = [probe("ascend_empty_layers", lambda self: [1], name) for name in ("one", "two")]
    with pytest.raises(HookError, match="'one' and 'two' both give '1'"), built(tmp_path, *probes):
        raise AssertionError("it was built all the same")


MODULE_HOOKS = (
    "ascend_linear",
    "ascend_embedding",
    "ascend_self_attention",
    "ascend_mlp",
    "ascend_layer",
    "ascend_output_layer",
    "ascend_model",
)


class Boxed(nn.Module):
    """What a wrapper must not be: the parameters are one name deeper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_a_wrapper_that_renames_parameters_is_refused(tmp_path: Path, hook: str) -> None:
    with (
        pytest.raises(HookError, match=f"{hook}: a wrapper changed the parameter names"),
        built(tmp_path, probe(hook, lambda self: Boxed)),
    ):
        raise AssertionError("it was built all the same")


def test_a_wrapper_that_renames_parameters_in_place_is_refused_too(tmp_path: Path) -> None:
    def rename(module: nn.Module) -> nn.Module:
        module.kernel = module.weight
        del module.weight
        return module

    with (
        pytest.raises(HookError, match="changed the parameter names of linear_proj"),
        built(tmp_path, probe("ascend_linear", lambda self: rename)),
    ):
        raise AssertionError("it was built all the same")
