"""The gated activation of feed-forwards in one autograd node, with its backward by hand.

Source: Shazeer 2020, arXiv:2002.05202.
"""

# F width of the feed-forward

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] (gate, then up) -> [..., F]: ``silu(gate) * up``, in the input's dtype.

    Numerics: two roundings in forward, as the plain composition. Kept for backward: the input and
    ``silu(gate)``, as the plain composition keeps; the gradient is written into one buffer. In a
    graph of torch.compile it is the plain composition, which the compiler fuses.
    """
    if torch.compiler.is_compiling():
        return plain_swiglu(gate_up)
    return _SwiGlu.apply(gate_up)


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """The same as a composition of torch's operations, differentiated by autograd."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
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
