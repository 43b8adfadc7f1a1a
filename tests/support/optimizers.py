"""Optimizers as a third party provides them: Lion written out, and three of torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ascend_run.plugin_api import Manifest, Numerics, OptimizerSpec, OptimizerState, hookimpl


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2; and the number of its steps in int64."""

    def __init__(self, params: Any, lr: float = 1e-4, momentum_dtype: str = "float32") -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.99)})
        self.momentum_dtype = getattr(torch, momentum_dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=self.momentum_dtype)
                    state["slow"] = p.clone()
                    state["count"] = torch.zeros((), dtype=torch.int64, device=p.device)
                state["count"] += 1
                momentum = state["momentum"].float()
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p -= group["lr"] * (update + group["weight_decay"] * p)
                state["momentum"].copy_(beta2 * momentum + (1 - beta2) * p.grad)
                state["slow"].copy_(0.75 * state["slow"] + 0.25 * p)


def _lion(dtype: str) -> OptimizerSpec:
    states = {
        "momentum": OptimizerState(dtype=dtype),
        "slow": OptimizerState(initial="parameter"),
        "count": OptimizerState(dtype="int64", scalar=True),
    }
    build = partial(Lion, momentum_dtype=dtype)
    return OptimizerSpec(build=build, states=states, element_wise=True)


def _torchs(build: Callable[..., Any], **states: OptimizerState) -> OptimizerSpec:
    return OptimizerSpec(build=build, states=states, element_wise=True)


_STEP = OptimizerState(scalar=True)
SPECS: Mapping[str, OptimizerSpec] = {
    "lion": _lion("float32"),
    "lion-bf16": _lion("bfloat16"),
    "sgd": _torchs(
        partial(torch.optim.SGD, momentum=0.9, foreach=False), momentum_buffer=OptimizerState()
    ),
    "adagrad": _torchs(
        partial(torch.optim.Adagrad, initial_accumulator_value=0.125, foreach=False),
        step=_STEP,
        sum=OptimizerState(initial=0.125),
    ),
    "rmsprop": _torchs(
        partial(torch.optim.RMSprop, foreach=False, eps=1e-3),
        step=_STEP,
        square_avg=OptimizerState(),
    ),
}


class Optimizes:
    """A plugin that provides one of ``SPECS``."""

    manifest = Manifest(name="optimizes", summary="another optimizer", numerics=Numerics.MODEL)

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def ascend_optimizer(self) -> OptimizerSpec:
        return SPECS[self.name]
