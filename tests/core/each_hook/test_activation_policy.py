"""Treatments of activations: their links are around all others, and act in the model that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ActivationTreatment, ForwardLink, Keeping
from ascend_run.types.forward import chain_of
from tests.support.marking import marking_link
from tests.support.probed_runs import built, probe, train

from .test_modules import pair

HOOK = "ascend_activation_policy"


def treating(name: str, keeping: Keeping, links: Any, *parts: str) -> Any:
    treatment = ActivationTreatment(keeping, links)
    return probe(HOOK, lambda self: dict.fromkeys(parts, treatment), name)


def test_ascend_activation_policy_links_each_layer_once_around_all_others(tmp_path: Path) -> None:
    asked: list[Any] = []
    marks: list[Any] = []

    def links(name: str, layer: Any, parts: Any, device: Any) -> dict[str, ForwardLink]:
        asked.append((name, layer.layer_number, *parts, device.name))
        return {"self_attention": marking_link(marks, name)(layer)}

    dropping = treating("drops", Keeping.DISCARD, partial(links, "drops"), "input_layernorm")
    moving = treating(
        "moves", Keeping.OFFLOAD, partial(links, "moves"), "self_attention", "pre_mlp_layernorm"
    )
    run = train(tmp_path, dropping, moving, *pair("ascend_self_attention", marks))

    assert asked == [
        (*what, "cpu")
        for number in (1, 2)
        for what in (
            ("moves", number, "self_attention", "pre_mlp_layernorm"),
            ("drops", number, "input_layernorm"),
        )
    ]
    names = chain_of(run.model.decoder.layers[0].self_attention).names
    assert names == ("inner", "outer", "moves", "drops")
    assert marks[:4] == ["drops", "moves", ("outer", 0), ("inner", 0)]


def test_a_treatment_within_a_recomputed_layer_makes_no_links(tmp_path: Path) -> None:
    def refuse(*_: Any) -> dict[str, ForwardLink]:
        raise AssertionError("called for a part that is recomputed with its layer")

    recomputing = treating("recomputes", Keeping.RECOMPUTE, None, "")
    moving = treating("moves", Keeping.OFFLOAD, refuse, "self_attention")
    with built(tmp_path, recomputing, moving) as (_, context):
        layers = context.models["policy"].chunks[0].module.decoder.layers
        assert not any(chain_of(layer.self_attention).names for layer in layers)


def test_links_of_modules_that_a_layer_does_not_have_name_the_plugin(tmp_path: Path) -> None:
    link = ForwardLink(wrap=lambda inner: inner, compilable=True)
    wrong = treating("wrong", Keeping.DISCARD, lambda *_: {"mlp.gate": link}, "mlp")
    with pytest.raises(AttributeError, match="gate") as raised, built(tmp_path, wrong):
        raise AssertionError("it was built all the same")
    assert any("'wrong'" in note for note in raised.value.__notes__)
