"""The MLPs of experts with the exchange of their tokens, as one differentiable operation.

Every expert takes the same number of tokens of each rank (dropped or padded). Forward and backward
are the same two fused operators of ``expert_collectives``, each with its matmul. A row is weighted
on the rank of its token, so that no weights are exchanged.

Saved are the gathered tokens (if fc1 is trained), the output of fc1, and the outputs of this rank's
own rows, from which the gradient of their weights follows; the activation is recomputed.
"""

# R rows of this rank (E * C, sorted by expert), E experts in all, e of this rank, C tokens of an
# expert from this rank, A tokens of a local expert from all ranks, H hidden size, F width of an
# expert on this rank

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function
from ascend_run.types.moe import ExpertActivation, ExpertWeights

from .all_to_all_dispatcher import AllToAllDispatcher
from .expert_collectives import all_to_all_all_gather_bmm, bmm_reduce_scatter_all_to_all
from .expert_mlp import weight_gradient
from .grouped_matmul import PaddedGroups


class ExpertGroups(NamedTuple):
    """The ranks that exchange tokens."""

    ep: dist.ProcessGroup  #: They hold different experts.
    tp: dist.ProcessGroup  #: They hold different columns of an expert.


class LocalDispatcher(AllToAllDispatcher):
    """Permutes and pads the rows of this rank, for experts that exchange them themselves.

    The counts that it returns are C for each of all E experts.
    """

    @property
    def exchanges(self) -> bool:
        """The experts exchange."""
        return False


def exchanged_experts(
    rows_RH: Tensor,
    probs_R: Tensor,
    weights: ExpertWeights,
    activation: ExpertActivation,
    groups: ExpertGroups,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Compute ``probs * (act(x @ fc1.T + fc1_bias) @ fc2.T + fc2_bias)`` where the experts are.

    Args:
        rows_RH: Sorted by expert; as many for each expert, and on each rank of both groups.
        probs_R: Any floating dtype; cast to that of the rows.
        weights: Of the local experts; biases only if the ranks of ``groups.tp`` do not share an
            expert.
        accumulate: Add the weights' gradients directly to their ``main_grad``, if data parallelism
            has set one, instead of to a separate tensor.

    Returns:
        [R, H], differentiable in rows, probs, weights and biases.

    Communication: an all-to-all and an all-gather of tokens, a reduce-scatter and an all-to-all of
    outputs; the same in backward, of the outputs' gradients and of the tokens' gradients.
    """
    out: Tensor = _ExchangedExperts.apply(
        rows_RH, probs_R, *weights, activation, groups, accumulate
    )
    return out


class _ExchangedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: Tensor,
        probs_R: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        fc1_bias: Tensor | None,
        fc2_bias: Tensor | None,
        activation: ExpertActivation,
        groups: ExpertGroups,
        accumulate: bool,
    ) -> Tensor:
        _, needs_probs, needs_fc1, *_ = ctx.needs_input_grad
        first = all_to_all_all_gather_bmm(
            _by_expert(rows_RH, fc1, groups),
            fc1.transpose(1, 2),
            *groups,
            bias=fc1_bias,
            gathered=needs_fc1,
        )
        out_ECH = bmm_reduce_scatter_all_to_all(
            activation(first.out), fc2.transpose(1, 2), *groups, bias=fc2_bias
        )
        out_RH = out_ECH.flatten(0, 1)
        ctx.activation, ctx.groups = activation, groups
        # Not unpacked from what is saved: hooks on saved tensors would lose their ``main_grad``.
        ctx.accumulated = (fc1, fc2) if accumulate else (None, None)
        ctx.save_for_backward(
            first.gathered, first.out, out_RH if needs_probs else None, probs_R, fc1, fc2
        )
        return out_RH * probs_R.to(out_RH.dtype).unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        gathered, hidden, out_RH, probs_R, fc1, fc2 = ctx.saved_tensors
        needs_rows, needs_probs, needs_fc1, needs_fc2, *needs_biases = ctx.needs_input_grad[:6]
        drows_RH = dprobs_R = dfc1 = dfc2 = dfc2_bias = None
        if needs_probs:
            dprobs_R = (dy_RH * out_RH).sum(dim=-1).to(probs_R.dtype)
        back = all_to_all_all_gather_bmm(
            _by_expert(dy_RH * probs_R.to(dy_RH.dtype).unsqueeze(-1), fc2, ctx.groups),
            fc2,
            *ctx.groups,
            gathered=needs_fc2 or needs_biases[1],
        )
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            active = ctx.activation(leaf)
        (dhidden,) = torch.autograd.grad(active, leaf, back.out)
        if needs_rows:
            drows_RH = bmm_reduce_scatter_all_to_all(dhidden, fc1, *ctx.groups).flatten(0, 1)
        own_fc1, own_fc2 = ctx.accumulated
        if needs_fc1:
            dfc1 = _weight_gradient(own_fc1, dhidden, gathered)
        if back.gathered is not None:
            dfc2 = _weight_gradient(own_fc2, back.gathered, active.detach()) if needs_fc2 else None
            dfc2_bias = back.gathered.sum(dim=1) if needs_biases[1] else None
        dfc1_bias = dhidden.sum(dim=1) if needs_biases[0] else None
        return (drows_RH, dprobs_R, dfc1, dfc2, dfc1_bias, dfc2_bias, None, None, None)


def _by_expert(rows_RH: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """[R, H] -> [E, C, H]."""
    num_experts = groups.ep.size() * len(weight)
    return rows_RH.view(num_experts, len(rows_RH) // num_experts, rows_RH.shape[1])


def _weight_gradient(accumulated: Tensor | None, a_eAN: Tensor, b_eAK: Tensor) -> Tensor:
    groups = PaddedGroups([a_eAN.shape[1]] * len(a_eAN), a_eAN.device)
    return weight_gradient(groups, accumulated, a_eAN.flatten(0, 1), b_eAK.flatten(0, 1))
