"""Mixture of experts: the computation of the experts on one rank.

Shape letters: see the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor


class ExpertWeights(NamedTuple):
    """The gated feed-forward weights of the experts on this rank."""

    fc1: Tensor
    """[X, 2F, H]: gate rows, then up rows; [X, F, H] where the activation is not gated."""
    fc2: Tensor
    """[X, H, F]."""


class ExpertsKernel(Protocol):
    """The feed-forward of every local expert on the tokens sent to it."""

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Sequence[int],
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        """``probs * (act(x @ fc1.T) @ fc2.T)`` for each token with its own expert.

        Args:
            tokens_TH: Sorted by expert: the first ``tokens_per_expert[0]`` are the first one's.
            tokens_per_expert: X counts, on the host; their sum is T; any may be 0, and then that
                expert's weights still receive a gradient of zeros.
            probs_T: Weight of each token in its expert's output; applied before fc2, as
                Megatron does.

        Returns:
            [T, H], differentiable in tokens, probs and weights.
        """
        ...


@attrs.frozen(kw_only=True)
class ExpertActivation:
    """The experts' non-linearity: ``function(gate) * up`` where gated, else ``function(x)``."""

    function: Callable[[Tensor], Tensor]
    gated: bool = True
    is_silu: bool = True
    """Whether it is SiLU, so that a fused SwiGLU may stand in for it."""
