"""The optimizer: torch's fused AdamW and a moving average."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.elementwise.ema_adamw import fused_ema_adamw_step_, warmed_up_decay


class EmaAdamWOptimizer(torch.optim.Optimizer):
    """AdamW with a state ``ema``, the average of the updated parameters.

    The step count is on the host, where reading it waits for no device.

    Args:
        ema_decay: Factor of the average in each step.
        warmup: Whether to warm the factor up.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        betas: tuple[float, float],
        eps: float,
        ema_decay: float,
        warmup: bool,
    ) -> None:
        defaults = {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        self.ema_decay, self.warmup = ema_decay, warmup

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter with a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                self._begin(parameter)
            # Parameters that got their first gradient later have taken fewer steps.
            for count, members in groupby(sorted(trained, key=self._count), key=self._count):
                self._step_alike([*members], group, count)

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["ema"] = parameter.detach().clone()
        state["step"] += 1

    def _count(self, parameter: Tensor) -> int:
        return int(self.state[parameter]["step"])

    def _step_alike(self, parameters: list[Tensor], group: dict[str, Any], count: int) -> None:
        """Update parameters that have taken the same number of steps."""
        first, second, averages = (
            [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq", "ema")
        )
        decay = self.ema_decay
        fused_ema_adamw_step_(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            first,
            second,
            averages,
            step=count,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            ema_decay=warmed_up_decay(decay, count) if self.warmup else decay,
        )
