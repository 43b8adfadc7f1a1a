"""The weights of a rank's experts, some experts at a time.

They are slices of the stacked ones, split once in a forward: in backward the gradients of all
slices become one tensor, or were added to the slices of ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.tensor_marks import mark
from ascend_run.types.moe import ExpertsKernel, ExpertWeights


class StackedExperts(Protocol):
    """The module of a rank's experts."""

    fc1: Tensor
    fc2: Tensor
    fc1_bias: Tensor | None
    fc2_bias: Tensor | None
    compute: ExpertsKernel


class WeightAdapter(Protocol):
    """What is trained beside the frozen weights of a rank's experts."""

    def adapted(self, weights: ExpertWeights, /) -> ExpertWeights:
        """Return the weights with what is added to them; differentiable in what is trained."""


def weights_of(experts: StackedExperts) -> ExpertWeights:
    """Return the weights that the experts compute with: their own, with what an ``adapter`` in the
    module adds to them."""
    own = ExpertWeights(experts.fc1, experts.fc2, experts.fc1_bias, experts.fc2_bias)
    adapter: WeightAdapter | None = getattr(experts, "adapter", None)
    return own if adapter is None else adapter.adapted(own)


def slices_of(experts: StackedExperts, sizes: Sequence[int]) -> list[ExpertWeights]:
    """Return the weights of neighbouring experts, so many at a time."""
    accumulates = getattr(experts.compute, "accumulate", False)
    fc1, fc2, *own_biases = weights_of(experts)
    matrices = [_split(weight, sizes, accumulates) for weight in (fc1, fc2)]
    biases = [_split(bias, sizes, False) for bias in own_biases]
    return [ExpertWeights(*parts) for parts in zip(*matrices, *biases, strict=True)]


def _split(weight: Tensor | None, sizes: Sequence[int], accumulates: bool) -> Sequence[Any]:
    """Split a stacked weight, and its ``main_grad`` if the kernel accumulates into that."""
    if weight is None:
        return [None] * len(sizes)
    main_grad: Tensor | None = getattr(weight, "main_grad", None) if accumulates else None
    parts: tuple[Tensor, ...] = _Split.apply(weight, sizes, main_grad is not None)
    if main_grad is not None:
        for part, gradient in zip(parts, _parts(main_grad, sizes), strict=True):
            mark(part, main_grad=gradient)
    return parts


def _parts(stacked: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(stacked, list(sizes))
    return parts


class _Split(Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, sizes: Sequence[int], accumulates: bool
    ) -> tuple[Tensor, ...]:
        ctx.accumulated = weight if accumulates else None
        return _parts(weight.detach(), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.accumulated is None:
            return torch.cat(gradients), None, None
        # Megatron's hook then does not add the placeholder that is returned.
        mark(ctx.accumulated, grad_added_to_main_grad=True)
        return torch.empty_like(ctx.accumulated), None, None
