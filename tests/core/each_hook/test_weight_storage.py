"""Weights of linears that a plugin stores in another form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.linear.stored_weight import held_tensors, stored_weight
from ascend_run.plugin_api import HookError
from tests.support.probed_runs import built, probe, train

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Halves:
    """Stores half of each value, which loses no bit."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pack(self, weight_NK: Tensor) -> Mapping[str, Tensor]:
        self.calls.append("pack")
        return {"half": weight_NK / 2}

    def unpack(self, packed: Mapping[str, Tensor], like: Tensor) -> Tensor:
        self.calls.append("unpack")
        assert packed["half"].shape == like.shape
        return packed["half"] * 2


def freeze(model: nn.Module) -> nn.Module:
    """Freeze the linears of the layers."""
    for name, parameter in model.named_parameters():
        if any(linear in name for linear in LINEARS):
            parameter.requires_grad_(False)
    return model


FREEZE = probe("ascend_model", lambda self: freeze, "freeze")


def test_ascend_weight_storage_packs_once_and_unpacks_for_each_use(
    tmp_path: Path,
) -> None:
    halves = Halves()
    run = train(tmp_path, probe("ascend_weight_storage", lambda self: halves), FREEZE)
    plain = train(tmp_path / "plain", FREEZE)
    assert halves.calls == ["pack"] * 8 + ["unpack"] * 16  # forward and backward of two layers
    assert run.readings()[0]["loss"] == plain.readings()[0]["loss"]
    assert run.weights.keys() == plain.weights.keys()
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    for name, parameter in run.model.named_parameters():
        is_linear = any(linear in name for linear in LINEARS)
        assert parameter.is_meta is is_linear
        assert parameter.shape == plain.weights[name].shape
        (held,) = held_tensors(parameter)
        assert torch.equal(held * 2 if is_linear else held, plain.weights[name])
        assert (parameter.grad is None) is is_linear


def test_ascend_weight_storage_of_none_leaves_weights_as_they_are(tmp_path: Path) -> None:
    with built(tmp_path, probe("ascend_weight_storage", lambda self: None)) as (_, context):
        (chunk,) = context.models["policy"].chunks
        assert not any(p.is_meta or stored_weight(p) for p in chunk.parameters())


def test_ascend_weight_storage_of_a_trained_weight_is_refused(tmp_path: Path) -> None:
    storing = probe("ascend_weight_storage", lambda self: Halves())
    with (
        pytest.raises(HookError, match=r"linear_proj.weight is stored by 'probe' in another form"),
        built(tmp_path, storing),
    ):
        pass


def test_ascend_weight_storage_is_passed_the_role(tmp_path: Path) -> None:
    asked: list[Any] = []
    with built(tmp_path, probe("ascend_weight_storage", lambda self, role: asked.append(role))):
        assert asked == ["policy"]
