"""Fused step of AdamW (or Adam) and the exponential moving average of the parameters.

Source: Loshchilov and Hutter 2019, arXiv:1711.05101; MindSpeed's npu_apply_fused_ema_adamw for the
order (the average uses the updated parameters).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .adamw import adamw_

Tensors = list[Tensor] | tuple[Tensor, ...]
"""The sequence types that torch's foreach operations accept."""


def warmed_up_decay(decay: float, step: int) -> float:
    """Return ``min(decay, (1 + step) / (10 + step))``: an EMA warmup that decays the start fast."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def ema_adamw_step_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    emas: Tensors,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    ema_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
) -> None:
    """Take one step on all tensors, in place::

        g += weight_decay * p                      if not decoupled (Adam); g is not modified
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)    the last term if decoupled
        s = ema_decay * s + (1 - ema_decay) * p

    Args:
        exp_avgs: m; exp_avg_sqs: v; emas: s. Each like its parameter; float32 (float64).
        step: From 1; ``m_hat = m / (1 - beta1 ** step)`` and v_hat alike with bias correction.
    """
    beta1, beta2 = betas
    if weight_decay and not decoupled:
        grads = torch._foreach_add(grads, params, alpha=weight_decay)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, second**0.5)
    torch._foreach_add_(denominators, eps)
    if weight_decay and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, value=-lr / first)
    torch._foreach_lerp_(emas, params, 1 - ema_decay)


@torch.no_grad()
def fused_ema_adamw_step_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    emas: Tensors,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    ema_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
) -> None:
    """Run ``ema_adamw_step_`` by torch's fused Adam, which CUDA, torch_npu and the CPU each have.

    Without bias correction, which that kernel always applies, it calls ``ema_adamw_step_``.
    """
    if not bias_correction:
        ema_adamw_step_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            emas,
            step=step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            ema_decay=ema_decay,
            decoupled=decoupled,
            bias_correction=False,
        )
        return
    adamw_(
        {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [torch.full((), float(step), device=p.device) for p in params],
        decoupled=decoupled,
    )
    torch._foreach_lerp_(emas, params, 1 - ema_decay)
