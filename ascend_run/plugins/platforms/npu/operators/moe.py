"""Permutation of tokens by expert, and its inverse."""

# T tokens, K experts per token, M = T * K, R rows that are not dropped, H hidden size

from __future__ import annotations

import torch
from torch import Tensor


def moe_token_permute(
    tokens_TH: Tensor, indices: Tensor, num_out_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """Return (rows [R, H] sorted by expert, row of each copy [M], int32)."""
    permuted, places = torch.ops.npu.npu_moe_token_permute(tokens_TH, indices, num_out_tokens)
    return permuted, places


def moe_token_permute_grad(
    dpermuted_MH: Tensor, tokens_TH: Tensor, indices: Tensor, places_M: Tensor
) -> Tensor:
    """Return the gradient of the tokens: the sum of their copies' gradients."""
    out: Tensor = torch.ops.npu.npu_moe_token_permute_grad(
        tokens_TH, dpermuted_MH, indices, places_M
    )
    return out


def moe_token_unpermute(permuted_MH: Tensor, places_M: Tensor, probs_TK: Tensor | None) -> Tensor:
    """Return the weighted sum of each token's copies, [T, H]; unweighted without ``probs_TK``."""
    out: Tensor = torch.ops.npu.npu_moe_token_unpermute(permuted_MH, places_M, probs_TK)
    return out


def moe_token_unpermute_grad(
    dtokens_TH: Tensor, permuted_MH: Tensor, places_M: Tensor, probs_TK: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (gradient of the rows, of the weights); the second is undefined without weights."""
    dpermuted, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(
        permuted_MH, dtokens_TH, places_M, probs_TK
    )
    return dpermuted, dprobs
