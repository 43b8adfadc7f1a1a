"""The MLPs of the experts with plain matmuls: what runs without a plugin for experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_run.types.moe import ExpertActivation, ExpertWeights

# T tokens, H hidden size, X experts


def loop_experts(
    tokens_TH: Tensor,
    tokens_per_expert: Sequence[int],
    probs_T: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
) -> Tensor:
    """Compute one expert after the other: types.moe.ExpertsKernel with plain matmuls.

    The weights are unbound once: indexing the stacked tensor would allocate a zero-filled gradient
    of the full stack for each expert.
    """
    outputs = []
    parts = zip(
        tokens_TH.split(list(tokens_per_expert)),
        probs_T.split(list(tokens_per_expert)),
        weights.fc1.unbind(0),
        weights.fc2.unbind(0),
        _by_expert(weights.fc1_bias, tokens_per_expert),
        _by_expert(weights.fc2_bias, tokens_per_expert),
        strict=True,
    )
    for x, prob, fc1, fc2, fc1_bias, fc2_bias in parts:
        hidden = x @ fc1.t()
        hidden = activation(hidden if fc1_bias is None else hidden + fc1_bias)
        prob_T1 = prob.unsqueeze(-1).to(hidden.dtype)
        out = (hidden * prob_T1) @ fc2.t()
        outputs.append(out if fc2_bias is None else out + prob_T1 * fc2_bias)
    return torch.cat(outputs)


def _by_expert(biases: Tensor | None, experts: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(experts) if biases is None else biases.unbind(0)
