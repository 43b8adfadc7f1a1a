"""Mixture of experts: the computation of the experts on one rank.

Shape letters: see ``ascend_run.plugin_api.contracts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ExpertWeights(NamedTuple):
    """MLP weights of the experts on this rank."""

    fc1: Tensor
    """[X, 2F, H]: gate rows, then up rows; [X, F, H] if the activation is not gated."""
    fc2: Tensor
    """[X, H, F]."""


class ExpertsKernel(Protocol):
    """The MLPs of all local experts, applied to the tokens dispatched to them."""

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Sequence[int],
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        """Compute ``probs * (act(x @ fc1.T) @ fc2.T)`` for each token with its expert's weights.

        Args:
            tokens_TH: Sorted by expert: the first ``tokens_per_expert[0]`` belong to expert 0.
            tokens_per_expert: X counts on the host, which sum to T. If one is 0, the expert's
                weights receive a gradient of zeros.
            probs_T: Routing probability of each token; applied before fc2, as in Megatron.

        Returns:
            [T, H], differentiable in tokens, probs and weights.
        """
        ...


class GroupedGemm(Protocol):
    """Grouped matmuls over rows that are partitioned into groups; not differentiable.
    ``ops.experts.grouped_matmul`` is the reference implementation."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        """
        Args:
            counts: Rows of each group, on the host; any may be 0.
        """

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        """Multiply each row by the matrix of its group, which may be a transposed view.

        Returns:
            [T, N].
        """
        ...

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        """Compute ``a.T @ b`` over the rows of each group.

        Returns:
            [X, N, K]; zeros for an empty group.
        """
        ...

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        """Add ``outer`` in place to an accumulator, which may have a wider dtype."""
        ...


@attrs.frozen(kw_only=True)
class ExpertActivation:
    """The experts' activation: ``function(gate) * up`` if gated, else ``function(x)``."""

    function: Callable[[Tensor], Tensor]
    gated: bool = True
    is_silu: bool = True
    """Whether ``function`` is SiLU, so that a fused SwiGLU may replace it."""
    fused: Callable[[Tensor], Tensor] | None = None
    """The whole activation, [..., 2F] (gate, then up) -> [..., F]: ``PlatformOps.swiglu`` as
    plugins wrapped it. None if the activation is not SwiGLU."""
