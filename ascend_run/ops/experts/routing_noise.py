"""What a router draws, and an even selection for benchmarks.

Source: jitter, arXiv:2101.03961 (section 2.4).
"""

from __future__ import annotations

import torch
from torch import Tensor

# T tokens, X experts


def jittered(x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Return ``x`` times independent uniform numbers between ``1 - eps`` and ``1 + eps``."""
    return x * torch.empty_like(x).uniform_(1 - eps, 1 + eps, generator=generator)


def evenly_selected(logits_TX: Tensor, topk: int) -> Tensor:
    """Return a selection [T, X] in which the loads of two experts differ by one token at most.

    A token takes the experts that follow those of the token before it.
    """
    num_tokens, num_experts = logits_TX.shape
    places = torch.arange(num_tokens * topk, device=logits_TX.device).view(num_tokens, topk)
    empty_TX = torch.zeros_like(logits_TX, dtype=torch.bool)
    return empty_TX.scatter(1, places % num_experts, True)
