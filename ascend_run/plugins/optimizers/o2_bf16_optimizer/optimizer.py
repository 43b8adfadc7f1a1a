"""The optimizer; imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_, new_states

from . import CHUNK
from .rounding import drawn, key_of, round_stochastically_


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW by torch's fused kernel on float32 copies of the moments, chunk by chunk.

    A parameter without gradient has no step.

    Args:
        params: float32.
        seed: Of the stochastic rounding of the second moment; None rounds to the nearest value.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        seed: int | None,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step; there is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad)

    def _step(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self._state(parameter)
        step = state["step"].add_(1)
        key = None if self.seed is None else key_of(step, self.seed)
        flat = (parameter.view(-1), grad.reshape(-1), state["exp_avg"], state["exp_avg_sq"])
        for p, g, first, second in zip(*(x.view(-1).split(CHUNK) for x in flat), strict=True):
            wide_first, wide_second = first.float(), second.float()
            adamw_(group, [p], [g], [wide_first], [wide_second], [step])
            first.copy_(wide_first)
            if key is not None:
                round_stochastically_(wide_second, drawn(p, g, key))
            second.copy_(wide_second)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state |= new_states(parameter, torch.bfloat16)
        return state
