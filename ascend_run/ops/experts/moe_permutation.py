"""Permutes tokens into the order of their experts and back, with a backward that only gathers.

The sort is stable, so equal routing gives equal order. Where autograd would add rows with atomic
operations (in nondeterministic order on a GPU), each token gathers its copies instead.

Source: MindSpeed's operator documentation, npu_moe_token_permute and npu_moe_token_unpermute;
torch_npu's documentation of the operators of the same names.
"""

# T tokens, K experts of a token (top-k), M = T * K copies, R rows after dropping, H hidden size, X
# experts, C capacity of an expert

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_run.ops.autograd_function import Function


def moe_token_permute(
    tokens_TH: Tensor,
    indices: Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Copy tokens, sorted by expert.

    Args:
        indices: The experts of each token, integer, [T, K] or [T]; with ``padded_mode`` the tokens
            of each expert, [X, C].
        num_out_tokens: How many of the sorted rows to return; a negative number drops so many at
            the end; None or 0 returns all.
        padded_mode: Select the tokens in ``indices``, without sorting.

    Returns:
        (permuted [R, H], places [M] int32): copy k of token t is row ``places[t * K + k]``, and is
            dropped if that is R or more. With ``padded_mode`` (tokens [X * C, H], indices).

    Differentiable in tokens.
    """
    if padded_mode:
        return tokens_TH.index_select(0, indices.reshape(-1)), indices
    order, places = sorted_places(indices)
    kept = order[:num_out_tokens] if num_out_tokens else order
    copies = 1 if indices.dim() == 1 else indices.shape[1]
    return _Permute.apply(tokens_TH, kept // copies, places, copies), places.to(torch.int32)


def sorted_places(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return (copies in the order of their experts, row of each copy), both [M] int64."""
    order = torch.argsort(indices.reshape(-1), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return order, places


def moe_token_unpermute(
    permuted_RH: Tensor,
    places: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Sum each token's weighted copies: the inverse of ``moe_token_permute``.

    Args:
        places: As ``moe_token_permute`` returns them; [M], any integer dtype, or [X, C].
        probs: Weight of each copy, [T, K]; None means ones and one copy a token. With
            ``padded_mode`` [X, C].
        restore_shape: (T, H), with ``padded_mode``.

    Returns:
        [T, H] in the dtype of ``permuted``; dropped copies count as zeros.

    Differentiable in permuted and probs. Numerics: multiplies and sums in float32 (float64).
    """
    if padded_mode:
        return _unpermute_padded(permuted_RH, places, probs, restore_shape)
    out: Tensor = _Unpermute.apply(permuted_RH, places.to(torch.int64), probs)
    return out


def _unpermute_padded(
    permuted: Tensor, places: Tensor, probs: Tensor | None, shape: Sequence[int] | None
) -> Tensor:
    if shape is None:
        raise ValueError("moe_token_unpermute: padded_mode needs restore_shape, (tokens, hidden)")
    rows = permuted.to(torch.promote_types(permuted.dtype, torch.float32))
    if probs is not None:
        rows = rows * probs.reshape(-1, 1)
    target = torch.zeros(tuple(shape), dtype=rows.dtype, device=rows.device)
    return target.index_add(0, places.reshape(-1).to(torch.int64), rows).to(permuted.dtype)


def _gather(rows_RH: Tensor, places_M: Tensor) -> Tensor:
    """Return the row of each copy, [M, H]; zeros for dropped copies."""
    num_rows = rows_RH.shape[0]
    if num_rows >= places_M.shape[0]:
        return rows_RH.index_select(0, places_M)
    if num_rows == 0:
        return rows_RH.new_zeros(places_M.shape[0], rows_RH.shape[1])
    found = rows_RH.index_select(0, places_M.clamp(max=num_rows - 1))
    return found * (places_M < num_rows).unsqueeze(-1)


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, sources_R: Tensor, places_M: Tensor, copies: int
    ) -> Tensor:
        ctx.save_for_backward(places_M)
        ctx.copies = copies
        return tokens_TH.index_select(0, sources_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpermuted_RH: Tensor) -> tuple[Tensor, None, None, None]:
        (places_M,) = ctx.saved_tensors
        copies = _gather(dpermuted_RH, places_M).unflatten(0, (-1, ctx.copies))
        return copies.sum(1), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, permuted_RH: Tensor, places_M: Tensor, probs_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if probs_TK is None else permuted_RH, places_M, probs_TK)
        ctx.rows = permuted_RH.shape[0]
        copies = _gather(permuted_RH, places_M)
        if probs_TK is None:
            return copies
        wide = torch.promote_types(permuted_RH.dtype, torch.float32)
        weighted = copies.unflatten(0, probs_TK.shape).to(wide) * probs_TK.unsqueeze(-1)
        out: Tensor = weighted.sum(1).to(permuted_RH.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, None, Tensor | None]:
        permuted_RH, places_M, probs_TK = ctx.saved_tensors
        if probs_TK is None:
            return _scatter(dy_TH, places_M, ctx.rows), None, None
        wide = torch.promote_types(dy_TH.dtype, torch.float32)
        dcopies = dy_TH.to(wide).unsqueeze(1) * probs_TK.unsqueeze(-1)
        copies = _gather(permuted_RH, places_M).unflatten(0, probs_TK.shape).to(wide)
        dprobs = (copies * dy_TH.to(wide).unsqueeze(1)).sum(-1).to(probs_TK.dtype)
        dpermuted = _scatter(dcopies.flatten(0, 1).to(permuted_RH.dtype), places_M, ctx.rows)
        return dpermuted, None, dprobs


def _scatter(copies_MH: Tensor, places_M: Tensor, num_rows: int) -> Tensor:
    """Return the rows [R, H], each from its single copy."""
    rows = torch.empty_like(copies_MH).index_copy_(0, places_M, copies_MH)
    return rows[:num_rows]
