"""CUDA implementations of operators of ``ascend_run.ops``, which replace the torch ones.

Elementwise operations with row reductions are compiled: eager kernels would write every
intermediate. Other operators are not replaced: matmuls and gathers are single kernels of torch, and
compiled graphs cannot hold our collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ascend_run.ops.attention.ring_update import ring_attention_update
from ascend_run.ops.elementwise.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from ascend_run.ops.elementwise.ema_adamw import ema_adamw_step_, fused_ema_adamw_step_
from ascend_run.ops.memory.host_mapped import HostMapped

from .compiled import compiled
from .host_mapped import PinnedMemory

COMPILED: Final = (dropout_add_layer_norm, dropout_add_rms_norm, ring_attention_update)
FUSED_BY_TORCH: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    ema_adamw_step_: fused_ema_adamw_step_
}
"""Torch implementation -> the same operator as a kernel of torch."""


def fused() -> dict[str, Callable[..., Any]]:
    """Return the value of PlatformOps.fused."""
    forms: dict[str, Callable[..., Any]] = {form.__name__: compiled(form) for form in COMPILED}
    forms |= {form.__name__: kernel for form, kernel in FUSED_BY_TORCH.items()}
    return forms | {HostMapped.__name__: PinnedMemory}


def described() -> dict[str, str]:
    """Return how each operator is implemented, for the operator table."""
    others = {
        ema_adamw_step_.__name__: "torch._fused_adamw_",
        HostMapped.__name__: "pinned memory",
    }
    return {form.__name__: "torch.compile" for form in COMPILED} | others
