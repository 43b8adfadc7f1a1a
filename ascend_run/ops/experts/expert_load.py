"""Count the tokens of each expert, for a router of any class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .token_dropping import TokenDropping

# X experts of the full model


class ExpertLoad:
    """Count the training tokens that select each expert, from now on.

    Args:
        router: A module that returns weights and a routing map [T, X], as Megatron's routers do.
            With ``dropping``, a ``TokenDropping``, the selection before it is counted, and how many
            selections it dropped.
        layer: Index in the whole model, from 0.
    """

    def __init__(self, router: nn.Module, layer: int = 0) -> None:
        self.layer = layer
        self.tokens_X: Tensor | None = None
        self.dropped: Tensor | None = None
        router.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return and reset this rank's count, ``[X]``; None if no token was routed."""
        tokens_X, self.tokens_X = self.tokens_X, None
        return tokens_X

    def take_dropped(self) -> Tensor | int:
        """Return and reset this rank's number of dropped selections."""
        dropped, self.dropped = self.dropped, None
        return 0 if dropped is None else dropped

    def _add(self, router: nn.Module, _: object, output: tuple[Tensor, Tensor]) -> None:
        # The first forward of a recomputed layer is without gradients, so that it counts once.
        if not router.training or not torch.is_grad_enabled():
            return
        counts_X = output[1].sum(dim=0)
        dropping: TokenDropping | None = getattr(router, "dropping", None)
        if dropping is not None and (selected_TX := dropping.selected_TX) is not None:
            counts_X = selected_TX.sum(dim=0)
            dropped = (selected_TX & ~output[1]).sum()
            self.dropped = dropped if self.dropped is None else self.dropped + dropped
        self.tokens_X = counts_X if self.tokens_X is None else self.tokens_X + counts_X
