"""The optimizer; imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_step_, new_states
from ascend_run.ops.elementwise.ema_adamw import warmed_up_decay

AVERAGE = "ema"
"""State with the averaged weights."""


class AveragingAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused kernel, which the CPU, CUDA and torch_npu each have; then one foreach
    operation for the averages.

    A parameter without gradient has no step: neither it nor its average changes.

    Args:
        ema_decay: d of ``ema = d * ema + (1 - d) * p``.
        ema_warmup: Whether d is at most ``(1 + t) / (10 + t)`` in step t of a parameter.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        ema_decay: float,
        ema_warmup: bool,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.ema_decay, self.ema_warmup = ema_decay, ema_warmup

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step; there is no closure."""
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._step(group, params)

    def _step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self._state(p) for p in params]
        adamw_step_(group, params, states)
        averages, steps = ([state[name] for state in states] for name in (AVERAGE, "step"))
        torch._foreach_lerp_(averages, params, self._weights(steps))

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state |= new_states(parameter)
            state[AVERAGE] = parameter.detach().clone()
        return state

    def _weights(self, steps: list[Tensor]) -> list[float]:
        """Return what the average of each parameter takes of its new value."""
        if not self.ema_warmup:
            return [1 - self.ema_decay] * len(steps)
        counts = torch.stack(steps).tolist()
        return [1 - warmed_up_decay(self.ema_decay, int(count)) for count in counts]
