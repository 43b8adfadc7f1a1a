"""Count the tokens of each expert, for a router of any class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# X experts of the full model


class ExpertLoad:
    """Count the training tokens that a router sends to each expert, from now on.

    Args:
        router: A module that returns weights and a routing map [T, X], as Megatron's routers do.
        layer: Index in the whole model, from 0.
    """

    def __init__(self, router: nn.Module, layer: int = 0) -> None:
        self.layer = layer
        self.tokens_X: Tensor | None = None
        router.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return and reset this rank's count, ``[X]``; None if no token was routed."""
        tokens_X, self.tokens_X = self.tokens_X, None
        return tokens_X

    def _add(self, router: nn.Module, _: object, output: tuple[Tensor, Tensor]) -> None:
        # The first forward of a recomputed layer is without gradients, so that it counts once.
        if router.training and torch.is_grad_enabled():
            counts_X = output[1].sum(dim=0)
            self.tokens_X = counts_X if self.tokens_X is None else self.tokens_X + counts_X
