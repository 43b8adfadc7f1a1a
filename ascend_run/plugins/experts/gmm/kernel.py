"""Implement contracts.ExpertsKernel with ops.expert_mlp."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.ops.elementwise.swiglu import swiglu
from ascend_run.ops.experts.compiled_swiglu import for_device
from ascend_run.ops.experts.expert_mlp import expert_mlp
from ascend_run.ops.experts.grouped_matmul import GROUPS, Backend, Counts, MakeGroups
from ascend_run.plugin_api import (
    ExpertActivation,
    ExpertWeights,
)


class GroupedExperts:
    """Compute all local experts in one operation.

    Args:
        backend: Implementation of the grouped GEMM, by name or as the platform's own; None chooses
            for each call, since the token counts change with the routing.
        accumulate: Whether the weights' gradients are accumulated directly in ``main_grad``.
        device: Where the experts are.

    Attributes:
        counts_on_device: Whether the token counts stay on the device. They do if the backend needs
            no slices; with None on CUDA, where torch's grouped GEMM is the first choice.
    """

    def __init__(
        self,
        backend: Backend | MakeGroups | None,
        *,
        accumulate: bool = False,
        device: torch.device,
    ) -> None:
        self.backend = backend
        self.accumulate = accumulate
        self.swiglu = for_device(device)
        make = GROUPS[backend] if isinstance(backend, str) else backend
        self.counts_on_device = (
            device.type == "cuda" if make is None else getattr(make, "counts_on_device", False)
        )

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Counts,
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        # ``expert_mlp`` has its own SwiGLU, which applies the router probabilities.
        has_own = activation.is_swiglu and activation.fused in (None, swiglu)
        return expert_mlp(
            tokens_TH,
            tokens_per_expert,
            probs_T,
            *weights,
            fused=None if has_own else activation,
            swiglu=self.swiglu,
            backend=self.backend,
            accumulate=self.accumulate,
        )
