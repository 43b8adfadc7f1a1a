"""Activations of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``: [..., 2F] (gate, then up) -> [..., F]."""
    out: Tensor = torch.ops.npu.npu_swiglu(gate_up, -1)
    return out


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``gate_up``."""
    out: Tensor = torch.ops.npu.npu_swiglu_backward(dy, gate_up, -1)
    return out
