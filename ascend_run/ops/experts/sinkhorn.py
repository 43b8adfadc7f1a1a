"""Sinkhorn's balance of the experts: a bias of each expert that gives all the same share of tokens.

Source: arXiv:2103.16716 (BASE layers; the assignment), arXiv:1306.0895 (the iteration).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

# T tokens on this rank, X experts

_MOST_ITERATIONS: Final = 1000


@torch.no_grad()
def sinkhorn_bias(logits_TX: Tensor, group: dist.ProcessGroup, tolerance: float = 1e-4) -> Tensor:
    """Return what is added to the logits [X], so that their softmax has equal means over tokens.

    These are the logarithms of the column factors of the doubly scaled ``exp(logits)``. The row
    factors do not change the order of a token's experts. Each round is an all-reduce of X numbers,
    which the host waits for; a NaN among the logits ends them, and every bias is NaN.

    Args:
        group: The ranks that share the tokens, equally many each.
        tolerance: The mean change of the bias at which the iteration ends.
    """
    num_tokens, num_experts = logits_TX.shape
    num_tokens *= group.size()
    smallest = torch.finfo(logits_TX.dtype).tiny
    bias_X = torch.zeros_like(logits_TX[0])
    for _ in range(_MOST_ITERATIONS):
        rows_T1 = (logits_TX + bias_X).logsumexp(dim=-1, keepdim=True)
        mass_X = (logits_TX - rows_T1).exp().sum(dim=0)
        dist.all_reduce(mass_X, group=group)
        before_X = bias_X
        bias_X = -(mass_X.clamp_min(smallest) / num_tokens).log() - math.log(num_experts)
        if not (bias_X - before_X).abs().mean() > tolerance:  # which NaN is not
            break
    return bias_X
