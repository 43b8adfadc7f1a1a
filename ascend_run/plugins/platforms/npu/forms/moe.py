"""Token permutation by fused operators; unsupported arguments use the torch implementation.

The operators need one row per copy of a token; dropped copies are replaced by rows of zeros. The
operators do not implement padded mode yet.
"""

# T tokens, K experts per token, M = T * K copies, R rows that are not dropped, H hidden size

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.experts import moe_permutation as torch_form
from ascend_run.plugins.platforms.npu.operators import moe as operators


def moe_token_permute(
    tokens_TH: Tensor,
    indices: Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.experts.moe_permutation.moe_token_permute``."""
    if padded_mode or tokens_TH.shape[0] == 0:
        return torch_form.moe_token_permute(tokens_TH, indices, num_out_tokens, padded_mode)
    result: tuple[Tensor, Tensor] = _Permute.apply(tokens_TH, indices, num_out_tokens)
    return result


def moe_token_unpermute(
    permuted_RH: Tensor,
    places: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Implement ``ops.experts.moe_permutation.moe_token_unpermute``."""
    if padded_mode or places.shape[0] == 0:
        return torch_form.moe_token_unpermute(
            permuted_RH, places, probs, padded_mode, restore_shape
        )
    out: Tensor = _Unpermute.apply(_pad_rows(permuted_RH, places), places.to(torch.int32), probs)
    return out


def _pad_rows(rows_RH: Tensor, places_M: Tensor) -> Tensor:
    missing = places_M.shape[0] - rows_RH.shape[0]
    return F.pad(rows_RH, (0, 0, 0, missing)) if missing else rows_RH


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, indices: Tensor, num_out_tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        permuted, places = operators.moe_token_permute(tokens_TH, indices, num_out_tokens)
        ctx.save_for_backward(tokens_TH, indices, places)
        ctx.mark_non_differentiable(places)
        return permuted, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpermuted_RH: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        tokens_TH, indices, places_M = ctx.saved_tensors
        dpermuted = _pad_rows(dpermuted_RH, places_M).contiguous()
        return operators.moe_token_permute_grad(dpermuted, tokens_TH, indices, places_M), None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, permuted_MH: Tensor, places_M: Tensor, probs: Tensor | None) -> Tensor:
        ctx.save_for_backward(permuted_MH, places_M, probs)
        return operators.moe_token_unpermute(permuted_MH, places_M, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtokens_TH: Tensor) -> tuple[Tensor, None, Tensor | None]:
        permuted_MH, places_M, probs = ctx.saved_tensors
        dpermuted, dprobs = operators.moe_token_unpermute_grad(
            dtokens_TH.contiguous(), permuted_MH, places_M, probs
        )
        return dpermuted, None, None if probs is None else dprobs
