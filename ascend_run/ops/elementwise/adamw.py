"""A step of AdamW by torch's fused kernel, which the CPU, CUDA and torch_npu each have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def new_states(parameter: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the states of a parameter before its first step: ``step``, ``exp_avg`` and
    ``exp_avg_sq``.

    Args:
        dtype: Of the moments; None: the parameter's.
    """
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    moments = ("exp_avg", "exp_avg_sq")
    return {"step": step} | {name: torch.zeros_like(parameter, dtype=dtype) for name in moments}


def adamw_(
    options: Mapping[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    decoupled: bool = True,
) -> None:
    """Update parameters and both moments in place; each tensor in float32 (float64).

    Args:
        options: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as in a parameter group.
        steps: Number of each parameter's step, from 1; not changed.
        decoupled: False adds the weight decay to the gradient: Adam.
    """
    beta1, beta2 = options["betas"]
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        amsgrad=False,
        maximize=False,
    )


def adamw_step_(
    options: Mapping[str, Any], params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
) -> None:
    """Take the next step of parameters with a gradient.

    Args:
        options: As of ``adamw_``.
        states: Of each parameter: ``step``, ``exp_avg`` and ``exp_avg_sq``, changed in place.
    """
    first, second, steps = (
        [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
    )
    torch._foreach_add_(steps, 1)
    grads = [p.grad for p in params if p.grad is not None]
    adamw_(options, [*params], grads, first, second, steps)
