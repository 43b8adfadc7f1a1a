"""SwiGLU in one autograd node with a manual backward.

Source: Shazeer 2020, arXiv:2002.05202.
"""

# F intermediate size of the MLP

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, [..., 2F] (gate, then up) -> [..., F], in the input's dtype.

    Numerics: rounds twice in forward, as ``plain_swiglu``. Saves the input and ``silu(gate)``, as
    ``plain_swiglu`` does; the gradient is written into one buffer. Within a torch.compile graph it
    runs ``plain_swiglu``, which the compiler fuses.
    """
    if torch.compiler.is_compiling():
        return plain_swiglu(gate_up)
    out: Tensor = _SwiGlu.apply(gate_up)
    return out


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """Compute ``swiglu`` by torch operations, differentiated by autograd."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(dy, activated, out=dup)
        torch.mul(dy, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dgate_up
