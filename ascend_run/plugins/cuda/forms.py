"""CUDA's forms of the operators of ``ascend_run.ops``, each in the place of its torch form.

What is elementwise and a sum over rows is compiled: eager kernels would write every intermediate.
What is not here is at its best as it is: products and gathers are single kernels of torch's, and a
compiled graph has no collectives of ours in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ascend_run.ops.attention.ring_update import ring_attention_update
from ascend_run.ops.elementwise.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from ascend_run.ops.elementwise.ema_adamw import ema_adamw_step_, fused_ema_adamw_step_

from .compiled import compiled

COMPILED: Final = (dropout_add_layer_norm, dropout_add_rms_norm, ring_attention_update)
FUSED_BY_TORCH: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    ema_adamw_step_: fused_ema_adamw_step_
}
"""Torch form -> the same by a kernel of torch's own."""


def fused() -> dict[str, Callable[..., Any]]:
    """PlatformOps.fused."""
    forms: dict[str, Callable[..., Any]] = {form.__name__: compiled(form) for form in COMPILED}
    return forms | {form.__name__: kernel for form, kernel in FUSED_BY_TORCH.items()}


def described() -> dict[str, str]:
    """What each form is made by, for the table of operators."""
    by_torch = {ema_adamw_step_.__name__: "torch._fused_adamw_"}
    return {form.__name__: "torch.compile" for form in COMPILED} | by_torch
