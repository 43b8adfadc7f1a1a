"""The SwiGLU of ``expert_mlp`` in one kernel each way, compiled for a GPU.

Separate operations are bound by memory: together they take up to a fifth as long as the grouped
GEMMs beside them.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.kernels.own_graphs import with_own_graphs

from .expert_mlp import SwiGlu

# t tokens, F expert width

HALF: Final = (torch.bfloat16, torch.float16)
GRAPHS: Final = 8
"""For each direction: a number of tokens, any number, one token; in each dtype."""


def _forward(hidden: Tensor, probs: Tensor, out: Tensor, kept: Tensor) -> None:
    gate, up = hidden.chunk(2, dim=-1)
    activated = F.silu(gate)
    kept.copy_(activated)
    out.copy_(activated * up * probs)


def _backward(
    dact: Tensor,
    hidden: Tensor,
    probs: Tensor,
    kept: Tensor,
    act: Tensor,
    dhidden: Tensor,
    dprobs: Tensor,
) -> None:
    gate, up = hidden.chunk(2, dim=-1)
    product, dproduct, sigmoid = kept * up, dact * probs, torch.sigmoid(gate)
    dprobs.copy_((dact * product).sum(dim=-1, keepdim=True))
    act.copy_(product * probs)
    dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
    dhidden.copy_(torch.cat([dgate, dproduct * kept], dim=-1))


class CompiledSwiGlu(SwiGlu):
    """SwiGlu in half precision by compiled kernels, which round once; other dtypes as there.

    Nothing is compiled before the first call.
    """

    def __init__(self) -> None:
        self._forward = with_own_graphs(_forward, limit=GRAPHS)
        self._backward = with_own_graphs(_backward, limit=GRAPHS)

    def forward(self, *operands: Tensor, **results: Tensor) -> None:
        run = super().forward if _is_left(*operands) else self._forward
        run(*operands, **results)

    def backward(self, *operands: Tensor, **results: Tensor) -> None:
        run = super().backward if _is_left(*operands) else self._backward
        run(*operands, **results)


def _is_left(*operands: Tensor) -> bool:
    """Whether torch's operations compute it: in other dtypes, and within a graph of torch.compile,
    which fuses them."""
    return operands[0].dtype not in HALF or torch.compiler.is_compiling()


def for_device(device: torch.device) -> SwiGlu:
    """Return the compiled one on a GPU that Triton supports."""
    if device.type != "cuda":
        return SwiGlu()
    from torch.utils._triton import has_triton

    return CompiledSwiGlu() if has_triton() else SwiGlu()
