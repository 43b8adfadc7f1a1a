"""Decide whether the experts of one layer are recomputed, in each forward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.experts.moe_recompute import Saves

# x experts of this rank


class Threshold:
    """The rule of one layer.

    Args:
        scale: Recompute above this many times the mean number of tokens of an expert.
        mean_by_token: That mean for each token of a rank's input: top-k times the number of ranks
            that exchange tokens, divided by the number of experts.
        group: Ranks that must decide alike, since they dispatch tokens again; None if each decides
            for itself and keeps its tokens.
    """

    def __init__(
        self,
        *,
        scale: float,
        mean_by_token: float,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._by_token = scale * mean_by_token
        self._group, self._device = group, device
        self.exceeded = 0
        """Forwards of this step that are recomputed."""

    def choose(self, counts_x: Tensor, num_tokens: int) -> Saves:
        """Return what the experts save."""
        exceeds = max(counts_x.tolist()) > self._by_token * num_tokens
        if self._group is not None and self._group.size() > 1:
            shared = torch.tensor(int(exceeds), device=self._device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
            exceeds = bool(shared.item())
        if not exceeds:
            return Saves.ALL
        self.exceeded += 1
        return Saves.TOKENS if self._group is None else Saves.NOTHING
