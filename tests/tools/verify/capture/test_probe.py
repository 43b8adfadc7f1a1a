"""Gradients are compared with differences away from constants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ascend_run.testing.pool import GlooPool


def changed_parameters() -> dict[str, bool]:
    """A job of the pool: of a linear and a norm, which parameters are changed."""
    from ascend_run.tools.verify.capture.probe import _leave_constants

    chunk = nn.ModuleDict({"linear": nn.Linear(2, 3, bias=False), "norm": nn.LayerNorm(4)})
    before = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    _leave_constants(cast("Any", SimpleNamespace(bundle=SimpleNamespace(chunks=[chunk]))))
    return {name: not torch.equal(p, before[name]) for name, p in chunk.named_parameters()}


def test_constant_parameters_are_changed_before_differences(gloo_pool: GlooPool) -> None:
    (changed,) = gloo_pool.run(changed_parameters, 1, timeout=300)
    assert changed == {"linear.weight": False, "norm.weight": True, "norm.bias": True}
