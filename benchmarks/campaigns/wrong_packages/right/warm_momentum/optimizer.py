"""The optimizer; imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AveragedGradients(torch.optim.Optimizer):
    """SGD along an exponential average of the gradients, without its bias towards 0."""

    def __init__(self, groups: list[dict[str, Any]], beta: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(parameter)
                    update += group["weight_decay"] * parameter
                    parameter.add_(update, alpha=-group["lr"])

    def _update(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["average"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros(())
        state["step"] += 1
        state["average"].lerp_(parameter.grad, 1 - self.beta)
        update: Tensor = state["average"] / (1 - self.beta ** state["step"])
        return update
