"""Implement contracts.ExpertsKernel with ops.exchanged_experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.experts.exchanged_experts import ExpertGroups, exchanged_experts
from ascend_run.plugin_api import ExpertActivation, ExpertWeights


class ExchangedExperts:
    """Exchange this rank's rows, and compute the local experts.

    Args:
        ep: Ranks with different experts.
        tp: Ranks that share them.
        accumulate: Whether the weights' gradients are accumulated directly in ``main_grad``.
    """

    def __init__(
        self, ep: dist.ProcessGroup, tp: dist.ProcessGroup, *, accumulate: bool = False
    ) -> None:
        self.groups, self.accumulate = ExpertGroups(ep, tp), accumulate

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Sequence[int],
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        """Take the rows of ``LocalDispatcher``: of this rank, as many for each of all experts."""
        return exchanged_experts(
            tokens_TH, probs_T, weights, activation, self.groups, accumulate=self.accumulate
        )
