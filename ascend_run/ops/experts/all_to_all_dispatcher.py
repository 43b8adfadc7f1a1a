"""The all-to-all token dispatcher, with the stages of Megatron's MoETokenDispatcher.

Each rank sends copies of its tokens to the ranks of their experts, and gets the outputs back. The
counts are gathered while the copies are made, and read on the host once: before the copies, if
tokens are dropped, as their number depends on the counts. If experts are padded to their capacity,
all counts are known, and nothing is read.

With ``overlap`` an all-to-all is waited for where its result is used: the experts' order of the
received rows, and shared experts (``moe_shared_expert_overlap``), are computed behind it; in
backward, what autograd runs in between (see ``token_exchange``).

Source: Megatron-LM's MoEAlltoAllTokenDispatcher; MindSpeed, ``moe_permutation_async_comm``.
"""

# T tokens of this rank, K experts of a token, R rows sent (T * K, if no token is dropped), Q rows
# received, X experts, x experts of this rank, E expert-parallel ranks, P expert tensor-parallel
# ranks, H hidden size, C capacity of an expert

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .capacity import expert_capacity
from .round_trip import ReceivedRows, RoundTrip
from .token_copies import FUSED, INDEXED, Copies, Permutation, copies_of, uneven_copies_of


class AllToAllDispatcher:
    """A token dispatcher instead of Megatron's.

    Args:
        inner: Megatron's MoEAlltoAllTokenDispatcher, or another one of these; its settings are
            taken over.
        overlap: Wait for an all-to-all where its result is used.
        fused: Permute with ``FusedPermutation``.
    """

    def __init__(self, inner: Any, *, overlap: bool = False, fused: bool = False) -> None:
        self.config, self.shared_experts = inner.config, inner.shared_experts
        self.ep_group, self.tp_group = inner.ep_group, inner.tp_group
        self.tp_ep_group = inner.tp_ep_group
        self.local_expert_indices = inner.local_expert_indices
        self.overlap = overlap or getattr(inner, "overlap", False)
        self.fused = fused or getattr(inner, "fused", False)
        self.permutation: Permutation = FUSED if self.fused else INDEXED
        self.capacity: int | None = None

    @property
    def exchanges(self) -> bool:
        """Whether experts are on several ranks."""
        return bool(self.tp_ep_group.size() > 1)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[..., H], [T, X], [T, X] -> [R, H], [R]."""
        self.hidden_shape, self.probs_dtype = hidden_states.shape, probs.dtype
        self.capacity = self._capacity(routing_map)
        self.counts_X = self._selected(routing_map)
        if self.exchanges and self.capacity is None:
            sizes = (self.ep_group.size(), self.tp_group.size(), len(self.counts_X))
            self.counts_EPX = self.counts_X.new_empty(sizes)
            flat = self.counts_EPX.flatten()
            self.gathering: dist.Work | None = dist.all_gather_into_tensor(
                flat, self.counts_X, group=self.tp_ep_group, async_op=True
            )
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        tokens_TH = hidden_states.view(-1, self.hidden_shape[-1])
        copies = self._arrange(routing_map)
        rows_RH = self.permutation.permute(tokens_TH, copies)
        probs_R = self.permutation.permute_probs(probs, copies)
        self.copies = copies
        return rows_RH, probs_R

    def token_dispatch(self, rows_RH: Tensor, probs_R: Tensor) -> Any:
        """Send the copies to the ranks of their experts."""
        if self.exchanges:
            self.received = self._received(self._counts())
        return self._send(rows_RH, probs_R)

    def _send(self, rows_RH: Tensor, probs_R: Tensor) -> Any:
        if not self.exchanges:
            return rows_RH, probs_R
        self.trip = self._trip(self.received)
        return self.trip.send(rows_RH, probs_R)

    def dispatch_postprocess(self, rows_RH: Any, probs_R: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rows sorted by expert [Q, H], the counts [x] and probabilities [Q]."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        if not self.exchanges:
            return rows_RH, self.counts_X, probs_R
        return self._arrive(rows_RH, probs_R)

    def _arrive(self, rows_RH: Any, probs_R: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.trip.arrive(rows_RH, probs_R)

    def combine_preprocess(self, rows_QH: Tensor) -> Tensor:
        """Return the experts' outputs to the order in which their tokens arrived."""
        return self.trip.leave(rows_QH) if self.exchanges else rows_QH

    def token_combine(self, rows_QH: Any) -> Any:
        """Send the outputs back."""
        return self.trip.send_back(rows_QH) if self.exchanges else rows_QH

    def combine_postprocess(self, rows_RH: Any) -> Tensor:
        """Sum the outputs of each token, in the shape of the hidden states."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        rows = self._come_back(rows_RH) if self.exchanges else rows_RH
        out = self._sum(rows).view(self.hidden_shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts.get_output()
        return out

    def _come_back(self, rows_RH: Any) -> Tensor:
        return self.trip.come_back(rows_RH)

    def _capacity(self, routing_map: Tensor) -> int | None:
        """Return how many rows every expert gets from every rank; None if that differs."""
        if not self.config.moe_pad_expert_input_to_capacity:
            return None
        (num_tokens, num_experts), topk = routing_map.shape, self.config.moe_router_topk
        factor = self.config.moe_expert_capacity_factor
        return expert_capacity(num_tokens, num_experts, topk, factor)

    def _selected(self, routing_map: Tensor) -> Tensor:
        """Return the number of rows of each expert [X]; on the host, if it must be known there."""
        if self.capacity is not None:
            return torch.full((routing_map.shape[1],), self.capacity)
        counts_X = routing_map.sum(dim=0)
        return counts_X.cpu() if self._drops and not self.exchanges else counts_X

    @property
    def _drops(self) -> bool:
        """Whether tokens may have fewer experts than they selected."""
        return self.config.moe_expert_capacity_factor is not None

    def _arrange(self, routing_map: Tensor) -> Copies:
        """Return the copies in the order in which they are sent."""
        if not self._drops:
            return copies_of(routing_map, self.config.moe_router_topk)
        own_X = self.counts_X
        if self.exchanges and self.capacity is None:
            own_X = self._counts()[self.ep_group.rank(), self.tp_group.rank()]
        return uneven_copies_of(routing_map, int(own_X.sum()))

    def _sum(self, rows_RH: Tensor) -> Tensor:
        """Sum the outputs of each token."""
        return self.permutation.unpermute(rows_RH, self.copies)

    def _counts(self) -> Tensor:
        """Return the counts of all ranks on the host; they are read once."""
        if self.capacity is not None:
            return self.counts_X.expand(self.ep_group.size(), self.tp_group.size(), -1)
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.counts_EPX = None, self.counts_EPX.cpu()
        return self.counts_EPX

    def _received(self, counts_EPX: Tensor) -> ReceivedRows:
        """Return the rows of each rank, of the numbers of rows that each one sends."""
        tp_rank, (first, *_) = self.tp_group.rank(), self.local_expert_indices
        local = slice(first, first + len(self.local_expert_indices))
        own_X = counts_EPX[self.ep_group.rank(), tp_rank]
        return ReceivedRows(
            sent_Ex=own_X.view(self.ep_group.size(), -1),
            chunks_PEx=counts_EPX[:, :, local].transpose(0, 1).contiguous(),
            tp_rank=tp_rank,
        )

    def _trip(self, rows: ReceivedRows) -> RoundTrip:
        return RoundTrip(
            rows,
            self.ep_group,
            self.tp_group,
            wide=self.probs_dtype,  # partial outputs are added in the routing's dtype
            capacity=self.capacity,
            overlap=self.overlap,
        )
