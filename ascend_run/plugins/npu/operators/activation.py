"""Activations of the feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] (gate, then up) -> [..., F]: ``silu(gate) * up``."""
    return torch.ops.npu.npu_swiglu(gate_up, -1)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of ``gate_up``."""
    return torch.ops.npu.npu_swiglu_backward(dy, gate_up, -1)
