"""Tokens in the order of their experts, and back."""

# T tokens, K experts of a token, M = T * K, R rows that are kept, H hidden size

from __future__ import annotations

import torch
from torch import Tensor


def moe_token_permute(
    tokens_TH: Tensor, indices: Tensor, num_out_tokens: int | None
) -> tuple[Tensor, Tensor]:
    """(rows [R, H] sorted by expert, row of each copy [M], int32)."""
    permuted, places = torch.ops.npu.npu_moe_token_permute(tokens_TH, indices, num_out_tokens)
    return permuted, places


def moe_token_permute_grad(
    dpermuted_MH: Tensor, tokens_TH: Tensor, indices: Tensor, places_M: Tensor
) -> Tensor:
    """Gradient of the tokens: the sum of their copies' gradients."""
    return torch.ops.npu.npu_moe_token_permute_grad(tokens_TH, dpermuted_MH, indices, places_M)


def moe_token_unpermute(permuted_MH: Tensor, places_M: Tensor, probs_TK: Tensor | None) -> Tensor:
    """[T, H]: the weighted sum of each token's copies; the copies themselves without weights."""
    return torch.ops.npu.npu_moe_token_unpermute(permuted_MH, places_M, probs_TK)


def moe_token_unpermute_grad(
    dtokens_TH: Tensor, permuted_MH: Tensor, places_M: Tensor, probs_TK: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(gradient of the rows, of the weights); the second means nothing where there are none."""
    dpermuted, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(
        permuted_MH, dtokens_TH, places_M, probs_TK
    )
    return dpermuted, dprobs
