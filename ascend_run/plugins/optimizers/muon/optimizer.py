"""The optimizer; imports torch."""

# A, B = rows and columns of a matrix; E = experts of a rank; N = blocks of fused rows

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_step_

from .newton_schulz import orthogonalized
from .parameters import ADAMW, ALGORITHM, MUON, ROWS, FusedRows

if TYPE_CHECKING:
    from . import MuonConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the parameter groups whose option ``algorithm`` is ``muon``; torch's fused AdamW for
    the others. A parameter without gradient has no step.

    Args:
        options: Of Muon; the others are AdamW's.
    """

    def __init__(
        self,
        params: Any,
        *,
        options: MuonConfig,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, ALGORITHM: ADAMW})
        self.options = options

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step; there is no closure."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group[ALGORITHM] == MUON:
                for parameter in params:
                    self._muon_step(group, parameter, parameter.grad)
            elif params:
                adamw_step_(group, params, [self._adamw_state(p) for p in params])

    def _muon_step(self, group: dict[str, Any], parameter_AB: Tensor, grad_AB: Tensor) -> None:
        options, state = self.options, self.state[parameter_AB]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter_AB)
        momentum_AB = state["momentum_buffer"]
        momentum_AB.lerp_(grad_AB, 1 - options.momentum)
        update_AB = momentum_AB
        if options.nesterov:
            update_AB = grad_AB.lerp(momentum_AB, options.momentum)
        lr = group["lr"] * options.lr_multiplier
        parameter_AB.mul_(1 - lr * group["weight_decay"])
        dtype = torch.bfloat16 if options.ns_dtype == "bfloat16" else parameter_AB.dtype
        rows = group[ROWS]
        for weight, update in zip(
            matrices(parameter_AB, rows), matrices(update_AB, rows), strict=True
        ):
            whole_AB = update.flatten(-3, -2)
            scale = options.extra_scale_factor * _scale(options.scale_mode, *whole_AB.shape[-2:])
            direction_AB = orthogonalized(whole_AB, options.num_ns_steps, dtype)
            weight.add_(direction_AB.reshape(weight.shape), alpha=-lr * scale)

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def matrices(tensor_AB: Tensor, rows: FusedRows | None) -> tuple[Tensor, ...]:
    """Return views of the matrices of a parameter, [N, A / N, B] each, or [E, N, A / N, B]."""
    if rows is None:
        return (tensor_AB.unsqueeze(-3),)
    blocks = tensor_AB.unflatten(-2, (rows.num_blocks, -1))
    unit = blocks.shape[-2] // sum(rows.shares)
    found: tuple[Tensor, ...] = blocks.split([unit * share for share in rows.shares], dim=-2)
    return found


def _scale(mode: str, num_rows: int, num_columns: int) -> float:
    """Return the scale of an update; see ``MuonConfig.scale_mode``."""
    if mode == "spectral":
        return math.sqrt(max(num_rows, num_columns))
    ratio = num_rows / num_columns
    return math.sqrt(max(1.0, ratio) if mode == "shape_scaling" else ratio)
