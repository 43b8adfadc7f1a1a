"""Token dropping: an expert computes at most its capacity of the tokens that selected it.

A dropped token gets nothing from that expert; the weights of its other experts stay. A padded
expert takes as many tokens as its capacity: others, with the weight 0, are added.

Source: Megatron-LM's ``apply_router_token_dropping``; capacity, arXiv:2006.16668 (section 2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .capacity import expert_capacity
from .routing import largest

# T tokens of this rank, X experts


def token_dropping(
    topk: int, factor: float | None, policy: str, *, pads: bool
) -> TokenDropping | None:
    """Return what drops tokens, or None if experts have no capacity."""
    return None if factor is None else TokenDropping(topk, factor, policy, pads=pads)


class TokenDropping:
    """The tokens that the experts of one layer compute.

    Args:
        topk: Experts that a token selects.
        factor: Capacity as a multiple of the mean number of tokens.
        policy: An expert keeps the tokens of largest weight (``probs``), or the first ones
            (``position``). Of equal weights, those of lower index are kept.
        pads: Add tokens that have not selected the expert, the first ones first.
    """

    def __init__(self, topk: int, factor: float, policy: str, *, pads: bool) -> None:
        self.topk, self.factor, self.policy, self.pads = topk, factor, policy, pads
        self.selected_TX: Tensor | None = None
        """The selection of the last forward, before tokens were dropped."""

    def __call__(self, probs_TX: Tensor, selected_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, 0 for a dropped or an added token, and the routing map [T, X]."""
        self.selected_TX = selected_TX
        num_tokens, num_experts = selected_TX.shape
        capacity = expert_capacity(num_tokens, num_experts, self.topk, self.factor)
        ranks_TX = probs_TX.detach() if self.policy == "probs" else torch.zeros_like(probs_TX)
        ranks_TX = ranks_TX.masked_fill(~selected_TX, -torch.inf)
        taken_TX = largest(ranks_TX.t(), capacity).t()
        kept_TX = selected_TX & taken_TX
        return probs_TX * kept_TX, taken_TX if self.pads else kept_TX
