"""Copies of tokens for their experts, sorted by expert, and the sum of each token's copies.

A copy is found from both ends: by row, which token it is of; by token, in which rows its copies
are. The fused permutation reads whichever it needs: both directions, and the backward of both, are
gathers. A row that is summed is read where it is, without a second tensor of copies, and no two
rows are added with atomic operations. Nothing synchronises with the device, as the number of rows
is known: T * K, or what an expert's capacity makes of it.

Source: Megatron-LM's ``moe_permute_fusion``, whose kernels are those of Transformer Engine.
"""

# T tokens, K experts of a token (top-k), R rows (T * K unless tokens are dropped or added), X
# experts, H hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function


@attrs.frozen(eq=False)
class Copies:
    """Where the copies of tokens are, sorted by expert, and within an expert by token."""

    token_R: Tensor  #: The token of each row; int64, as the others.
    choice_R: Tensor  #: Each row's entry in the flattened [T, X].
    row_TK: Tensor
    """The rows of each token, in the order of its experts; [R] with ``first_T``."""
    num_experts: int
    first_T: Tensor | None = None
    """Where a token's rows begin in ``row_TK``, if tokens have different numbers of them."""

    @property
    def num_tokens(self) -> int:
        return (self.row_TK if self.first_T is None else self.first_T).shape[0]

    def reordered(self, order: Tensor) -> Copies:
        """Return the same copies with the row ``order[r]`` as row r."""
        return attrs.evolve(
            self,
            token_R=self.token_R[order],
            choice_R=self.choice_R[order],
            row_TK=inverse_of(order)[self.row_TK],
        )


def copies_of(routing_map_TX: Tensor, topk: int) -> Copies:
    """Return the copies of a routing map in which every token has ``topk`` experts."""
    num_tokens, num_experts = routing_map_TX.shape
    token_R, choice_R = _by_expert(routing_map_TX, num_tokens * topk)
    row_TK = token_R.argsort(stable=True).view(num_tokens, topk)
    return Copies(token_R, choice_R, row_TK, num_experts)


def uneven_copies_of(routing_map_TX: Tensor, num_rows: int) -> Copies:
    """Return the copies of a routing map in which tokens have any number of experts.

    Args:
        num_rows: How many they have together.
    """
    token_R, choice_R = _by_expert(routing_map_TX, num_rows)
    rows_T = routing_map_TX.sum(dim=1)
    row_R, first_T = token_R.argsort(stable=True), rows_T.cumsum(0) - rows_T
    return Copies(token_R, choice_R, row_R, routing_map_TX.shape[1], first_T)


def _by_expert(routing_map_TX: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return ``token_R`` and ``choice_R``."""
    pairs_R2 = torch.nonzero_static(routing_map_TX.t().contiguous(), size=num_rows)
    expert_R, token_R = (column.clone() for column in pairs_R2.unbind(1))  # saved one by one
    return token_R, token_R * routing_map_TX.shape[1] + expert_R


class Permutation(Protocol):
    """How copies are made and summed; all three are differentiable."""

    def permute(self, tokens_TH: Tensor, copies: Copies) -> Tensor:
        """Copy each token to its rows: [T, H] -> [R, H]."""
        ...

    def permute_probs(self, probs_TX: Tensor, copies: Copies) -> Tensor:
        """Return the probability of each row: [T, X] -> [R]."""
        ...

    def unpermute(self, rows_RH: Tensor, copies: Copies) -> Tensor:
        """Sum the rows of each token: [R, H] -> [T, H]."""
        ...


class IndexedPermutation:
    """Rows are selected and added by index, with autograd's backward."""

    def permute(self, tokens_TH: Tensor, copies: Copies) -> Tensor:
        return tokens_TH.index_select(0, copies.token_R)

    def permute_probs(self, probs_TX: Tensor, copies: Copies) -> Tensor:
        return probs_TX.flatten().index_select(0, copies.choice_R)

    def unpermute(self, rows_RH: Tensor, copies: Copies) -> Tensor:
        out: Tensor = _AddByIndex.apply(rows_RH, copies.token_R, copies.num_tokens)
        return out


class FusedPermutation:
    """Both directions, and the backward of both, only gather."""

    def permute(self, tokens_TH: Tensor, copies: Copies) -> Tensor:
        out: Tensor = _Permute.apply(tokens_TH, copies.token_R, copies.row_TK, copies.first_T)
        return out

    def permute_probs(self, probs_TX: Tensor, copies: Copies) -> Tensor:
        out: Tensor = _PermuteProbs.apply(probs_TX, copies.choice_R)
        return out

    def unpermute(self, rows_RH: Tensor, copies: Copies) -> Tensor:
        out: Tensor = _Unpermute.apply(
            rows_RH, copies.choice_R, copies.row_TK, copies.first_T, copies.num_experts
        )
        return out


INDEXED: Final[Permutation] = IndexedPermutation()
FUSED: Final[Permutation] = FusedPermutation()


def swap_chunks(rows: Tensor, sizes_PQ: Sequence[Sequence[int]]) -> Tensor:
    """Return chunks of rows that are sorted by p and then by q, sorted by q and then by p.

    Args:
        sizes_PQ: Rows of each chunk, on the host. Their transpose reverses the swap.
    """
    out: Tensor = _SwapChunks.apply(rows, sizes_PQ)
    return out


def transposed(sizes_PQ: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sizes of the same chunks after ``swap_chunks``."""
    return [*zip(*sizes_PQ, strict=True)]


def inverse_of(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)


def _sum(rows_RH: Tensor, row_TK: Tensor, first_T: Tensor | None) -> Tensor:
    if first_T is None and (row_TK.shape[1] == 1 or row_TK.shape[0] == 0):
        return rows_RH.index_select(0, row_TK.flatten())
    if first_T is not None and not row_TK.shape[0]:
        return rows_RH.new_zeros(first_T.shape[0], rows_RH.shape[1])
    return F.embedding_bag(row_TK, rows_RH.detach().contiguous(), first_T, mode="sum")


class _AddByIndex(Function):
    """index_add to zeros; that of autograd would save the rows."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, token_R: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token_R)
        zeros_TH = rows_RH.new_zeros(num_tokens, rows_RH.shape[1])
        return zeros_TH.index_add_(0, token_R, rows_RH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtokens_TH: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return dtokens_TH.index_select(0, token_R), None, None


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, token_R: Tensor, row_TK: Tensor, first_T: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(row_TK, first_T)
        return tokens_TH.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(drows_RH, *ctx.saved_tensors), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: Tensor,
        choice_R: Tensor,
        row_TK: Tensor,
        first_T: Tensor | None,
        num_experts: int,
    ) -> Tensor:
        ctx.save_for_backward(choice_R)
        ctx.num_experts = num_experts
        return _sum(rows_RH, row_TK, first_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtokens_TH: Tensor) -> tuple[Tensor, None, None, None, None]:
        (choice_R,) = ctx.saved_tensors
        return dtokens_TH.index_select(0, choice_R // ctx.num_experts), None, None, None, None


class _PermuteProbs(Function):
    @staticmethod
    def forward(ctx: Any, probs_TX: Tensor, choice_R: Tensor) -> Tensor:
        ctx.save_for_backward(choice_R)
        ctx.shape = probs_TX.shape
        return probs_TX.flatten().index_select(0, choice_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs_R: Tensor) -> tuple[Tensor, None]:
        (choice_R,) = ctx.saved_tensors
        dprobs = dprobs_R.new_zeros(ctx.shape.numel()).index_copy_(0, choice_R, dprobs_R)
        return dprobs.view(ctx.shape), None


class _SwapChunks(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes_PQ: Sequence[Sequence[int]]) -> Tensor:
        ctx.sizes_PQ = sizes_PQ
        return _swapped(rows, sizes_PQ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        return _swapped(drows, transposed(ctx.sizes_PQ)), None


def _swapped(rows: Tensor, sizes_PQ: Sequence[Sequence[int]]) -> Tensor:
    chunks = rows.split([size for sizes in sizes_PQ for size in sizes])
    num_q = len(sizes_PQ[0])
    return torch.cat([chunk for q in range(num_q) for chunk in chunks[q::num_q]])
