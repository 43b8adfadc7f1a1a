"""The MLPs of experts by weights that oneDNN has packed, for models that only compute forward."""

# T tokens, H hidden size, X experts, N outputs and K inputs of a projection

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.ops.linear.packed_linear import DTYPES, PackedWeight, unavailable
from ascend_run.types.moe import ExpertActivation, ExpertWeights

from .loop_experts import loop_experts


class PackedExperts:
    """``types.moe.ExpertsKernel``: packed weights where ``pack`` has made some, else plain matmuls.

    Numerics: a token's row does not depend on the other tokens of its expert, to the bit.
    """

    def __init__(self) -> None:
        self.packed: dict[Tensor, list[PackedWeight]] = {}
        """Stacked weights -> those of each expert."""

    def pack(self, stack_XNK: Tensor) -> None:
        """Pack the values as they are now, if this machine can; see ``PackedWeight.pack``. The
        memory of the plain weights is freed, and what reads them nevertheless reads NaN."""
        if stack_XNK.dtype not in DTYPES or unavailable(stack_XNK.dtype) is not None:
            return
        weights = [PackedWeight(weight_NK) for weight_NK in stack_XNK.detach().unbind(0)]
        for weight in weights:
            weight.pack()
        self.packed[stack_XNK] = weights
        stack_XNK.data = stack_XNK.new_full((1, 1, 1), torch.nan).expand(stack_XNK.shape)

    def __call__(
        self,
        tokens_TH: Tensor,
        tokens_per_expert: Sequence[int],
        probs_T: Tensor,
        weights: ExpertWeights,
        activation: ExpertActivation,
    ) -> Tensor:
        fc1, fc2 = (self.packed.get(stack) for stack in (weights.fc1, weights.fc2))
        if fc1 is None or fc2 is None:
            return loop_experts(tokens_TH, tokens_per_expert, probs_T, weights, activation)
        outputs, first = [], 0
        for expert, count in enumerate(tokens_per_expert):
            if not count:
                continue
            rows = slice(first, first := first + count)
            hidden = activation(fc1[expert](tokens_TH[rows], _of(weights.fc1_bias, expert)))
            prob_T1 = probs_T[rows, None].to(hidden.dtype)
            out = fc2[expert](hidden * prob_T1)
            bias = _of(weights.fc2_bias, expert)
            outputs.append(out if bias is None else out + prob_T1 * bias)
        return torch.cat(outputs) if outputs else torch.empty_like(tokens_TH)


def _of(bias_XN: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_XN is None else bias_XN[expert]
