"""Mixture of experts: the computation of the experts on one rank.

Shape letters: see the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    import torch
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


class GroupedProducts(Protocol):
    """The products of one partition of rows into groups, each with a matrix of its own; not
    differentiable. ``ops.experts.grouped_matmul`` has it in torch's operations."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        """Args:
        counts: Rows of each group, on the host; any may be 0.
        """

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        """[T, N]: each row times the matrix of its group. Matrices may be transposed views."""
        ...

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        """[X, N, K]: ``a.T @ b`` over the rows of each group; zeros for an empty one."""
        ...

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        """Add ``outer`` to a sum, which may be of a wider dtype, in place."""
        ...


@attrs.frozen(kw_only=True)
class ExpertActivation:
    """The experts' non-linearity: ``function(gate) * up`` where gated, else ``function(x)``."""

    function: Callable[[Tensor], Tensor]
    gated: bool = True
    is_silu: bool = True
    """Whether it is SiLU, so that a fused SwiGLU may stand in for it."""
    fused: Callable[[Tensor], Tensor] | None = None
    """All of it, [..., 2F] (gate, then up) -> [..., F], by the operator of the table: what plugins
    made of ``PlatformOps.swiglu``. None where the activation is another."""
