"""The all-gather token dispatcher, with the stages of Megatron's MoETokenDispatcher.

Each rank gathers the tokens of all ranks, computes its own experts for those that chose them, and
the outputs are reduce-scattered. Gathered are, in this order, each token's experts, their weights,
and the hidden states: while these arrive, the rows of this rank's experts are found and counted.
Megatron's gathers the choices and weights of all experts, K of which are not zero.

Shared experts may be computed while the outputs are reduce-scattered; in backward, while these
gradients are gathered (see ``token_exchange``).

Rows are copied and summed by gathers in both directions, as in ``token_copies``; a token may have
any number of experts on this rank, and fewer than K in all if experts dropped it.

Source: Megatron-LM's MoEAllGatherTokenDispatcher; MindSpeed, ``moe_permutation_async_comm``.
"""

# T tokens of this rank, G of all ranks, K experts of a token, X experts, x experts of this rank,
# R rows of these, M = T * K, H hidden size

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function

from .deferred_experts import DeferredExperts
from .token_exchange import AllGather, Exchange, ReduceScatter


class AllGatherDispatcher:
    """A token dispatcher instead of Megatron's.

    Args:
        inner: Megatron's MoEAllGatherTokenDispatcher, whose settings are taken over.
    """

    def __init__(self, inner: Any) -> None:
        self.config, self.group = inner.config, inner.tp_ep_group
        self.shared_experts: DeferredExperts | None = None
        experts = inner.local_expert_indices
        self.first, self.num_local = experts[0], len(experts)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[..., H], [T, X], [T, X] -> [T, H], [T, K]."""
        self.hidden_shape = hidden_states.shape
        tokens_TH = hidden_states.view(-1, self.hidden_shape[-1])
        if self.config.moe_expert_capacity_factor is not None:
            return tokens_TH, self._kept(routing_map, probs)
        (num_tokens, num_experts), topk = probs.shape, self.config.moe_router_topk
        token_M, expert_M = torch.nonzero_static(routing_map, size=num_tokens * topk).unbind(1)
        self.expert_TK = expert_M.to(torch.int32).view(num_tokens, topk)
        weights_TK = select(probs, token_M * num_experts + expert_M).view(num_tokens, topk)
        return tokens_TH, weights_TK

    def _kept(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """Return the weights [T, K] of experts that did not drop the token; the others are expert
        -1, of weight 0."""
        num_experts = routing_map.shape[1]
        last_X = torch.arange(num_experts, 0, -1, device=probs.device, dtype=torch.float32)
        ranks_TK, expert_TK = (routing_map * last_X).topk(self.config.moe_router_topk, dim=-1)
        is_kept_TK = ranks_TK > 0
        self.expert_TK = expert_TK.masked_fill(~is_kept_TK, -1).to(torch.int32)
        token_T1 = torch.arange(0, routing_map.numel(), num_experts, device=probs.device)[:, None]
        weights_TK = select(probs, (token_T1 + expert_TK).flatten()).view_as(expert_TK)
        return weights_TK * is_kept_TK

    def token_dispatch(self, tokens_TH: Tensor, weights_TK: Tensor) -> tuple[Any, Tensor]:
        """Gather the experts, weights and tokens of all ranks."""
        self.experts_GK = self.expert_TK
        if self.group.size() == 1:
            return tokens_TH, weights_TK
        weights_GK = self._start_choices(weights_TK)
        self.moving = AllGather(self.group)
        return self.moving.start(tokens_TH), weights_GK

    def _start_choices(self, weights_TK: Tensor) -> Tensor:
        """Gather each token's experts, and their weights."""
        self.experts_GK = self.expert_TK.new_empty(
            self.group.size() * self.expert_TK.shape[0], self.expert_TK.shape[1]
        )
        self.choosing = dist.all_gather_into_tensor(
            self.experts_GK, self.expert_TK, group=self.group, async_op=True
        )
        self.weighting = AllGather(self.group)
        return self.weighting.start(weights_TK)

    def dispatch_postprocess(
        self, tokens_GH: Tensor, weights_GK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rows sorted by expert [R, H], the counts [x] and weights [R]."""
        exchanges = self.group.size() > 1
        if exchanges:
            self.choosing.wait()
        expert_R, choice_R = self._local_choices()
        counts_x, choice_R = sorted_choices(expert_R, choice_R, self.num_local)
        num_tokens, topk = weights_GK.shape
        self.rows = local_rows(choice_R // topk, num_tokens)
        if exchanges:
            weights_GK = self.weighting.finish(weights_GK)
            tokens_GH = self.moving.finish(tokens_GH)
        self.probs_dtype = weights_GK.dtype
        return self.rows.permute(tokens_GH), counts_x, select(weights_GK, choice_R)

    def combine_preprocess(self, rows_RH: Tensor) -> Tensor:
        """Sum this rank's outputs of each token, in the dtype of the weights."""
        self.out_dtype = rows_RH.dtype
        wide = rows_RH if self.group.size() == 1 else rows_RH.to(self.probs_dtype)
        return self.rows.unpermute(wide)

    def token_combine(self, out_GH: Any) -> Any:
        """Reduce-scatter the sums of all ranks."""
        if self.group.size() == 1:
            return out_GH
        self.returning: Exchange = ReduceScatter(self.group)
        return self.returning.start(out_GH)

    def combine_postprocess(self, out_TH: Any) -> Tensor:
        """Return them in the shape of the hidden states, with those of the shared experts."""
        shared = None if self.shared_experts is None else self.shared_experts.output()
        out = self._come_back(out_TH).view(self.hidden_shape)
        return out if shared is None else out + shared

    def _come_back(self, out_TH: Any) -> Tensor:
        """Wait for the sums of this rank's tokens."""
        if self.group.size() == 1:
            alone: Tensor = out_TH
            return alone
        return self.returning.finish(out_TH).to(self.out_dtype)

    def _local_choices(self) -> tuple[Tensor, Tensor]:
        """Return the local expert of each row, and the index of its choice in the flattened [G,
        K]."""
        expert_M = self.experts_GK.flatten().to(torch.int64) - self.first
        is_local = (expert_M >= 0) & (expert_M < self.num_local)
        choice_R = is_local.nonzero().squeeze(1)
        return expert_M.index_select(0, choice_R), choice_R


def sorted_choices(group_R: Tensor, choice_R: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the rows of each group, and the choices sorted by group and then as they are."""
    order = group_R.argsort(stable=True)
    return torch.bincount(group_R, minlength=num_groups), choice_R.index_select(0, order)


@attrs.frozen(eq=False)
class LocalRows:
    """The rows of this rank's experts: copies of gathered tokens."""

    token_R: Tensor  #: The token of each row.
    row_R: Tensor  #: The rows in the order of their tokens.
    start_G: Tensor  #: The place there of each token's first row.

    def permute(self, tokens_GH: Tensor) -> Tensor:
        """Copy the tokens to rows."""
        out: Tensor = _Permute.apply(tokens_GH, self.token_R, self.row_R, self.start_G)
        return out

    def unpermute(self, rows_RH: Tensor) -> Tensor:
        """Sum the rows of each token."""
        out: Tensor = _Unpermute.apply(rows_RH, self.token_R, self.row_R, self.start_G)
        return out


def local_rows(token_R: Tensor, num_tokens: int) -> LocalRows:
    """Return the rows of these tokens."""
    rows_G = torch.bincount(token_R, minlength=num_tokens)
    return LocalRows(token_R, token_R.argsort(stable=True), rows_G.cumsum(0) - rows_G)


def _sum(rows_RH: Tensor, row_R: Tensor, start_G: Tensor) -> Tensor:
    """Sum the rows of each token; 0 for a token without rows."""
    if not row_R.shape[0] or not start_G.shape[0]:
        return rows_RH.new_zeros(start_G.shape[0], rows_RH.shape[1])
    return F.embedding_bag(row_R, rows_RH.detach().contiguous(), start_G, mode="sum")


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_GH: Tensor, token_R: Tensor, row_R: Tensor, start_G: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_R, start_G)
        return tokens_GH.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(drows_RH, *ctx.saved_tensors), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RH: Tensor, token_R: Tensor, row_R: Tensor, start_G: Tensor
    ) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum(rows_RH, row_R, start_G)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_GH: Tensor) -> tuple[Tensor, None, None, None]:
        (token_R,) = ctx.saved_tensors
        return dout_GH.index_select(0, token_R), None, None, None


class _Select(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, choice_R: Tensor) -> Tensor:
        ctx.save_for_backward(choice_R)
        ctx.shape = weights.shape
        return weights.flatten().index_select(0, choice_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_R: Tensor) -> tuple[Tensor, None]:
        (choice_R,) = ctx.saved_tensors
        zeros = dweights_R.new_zeros(ctx.shape.numel())
        return zeros.index_copy_(0, choice_R, dweights_R).view(ctx.shape), None


def select(weights: Tensor, choice_R: Tensor) -> Tensor:
    """Return entries of a matrix by flat index, each at most once; saves the index alone."""
    out: Tensor = _Select.apply(weights, choice_R)
    return out
