"""MoE token permutation, as documented."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert not padded_mode, "not there yet"
    assert tokens.dim() == 2
    assert indices.dtype in (torch.int32, torch.int64)
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    flat = indices.flatten().tolist()
    rows = sorted(range(len(flat)), key=flat.__getitem__)  # stable
    places = torch.empty(len(flat), dtype=torch.int32)
    places[rows] = torch.arange(len(flat), dtype=torch.int32)
    kept = rows if not num_out_tokens else rows[:num_out_tokens]
    return tokens[[row // top_k for row in kept]], places


def npu_moe_token_permute_grad(
    tokens: Tensor,
    grad_permuted_tokens: Tensor,
    indices: Tensor,
    sorted_indices: Tensor,
    padded_mode: bool = False,
) -> Tensor:
    assert not padded_mode
    assert grad_permuted_tokens.is_contiguous()
    assert sorted_indices.dtype is torch.int32
    assert len(grad_permuted_tokens) == len(sorted_indices), "a row for every copy"
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    grad = torch.zeros_like(tokens)
    for copy, place in enumerate(sorted_indices.tolist()):
        grad[copy // top_k] += grad_permuted_tokens[place]
    return grad


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    assert not padded_mode
    assert restore_shape is None
    assert sorted_indices.dtype is torch.int32
    assert len(permuted_tokens) == len(sorted_indices), "a row for every copy"
    copies = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return copies
    tokens, top_k = probs.shape
    weighted = copies.view(tokens, top_k, -1) * probs[:, :, None]
    return weighted.sum(1).to(permuted_tokens.dtype)


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> tuple[Tensor, Tensor | None]:
    assert not padded_mode
    assert grad_unpermuted_tokens.is_contiguous()
    top_k = 1 if probs is None else probs.shape[1]
    dpermuted = torch.empty_like(permuted_tokens)
    dprobs = None if probs is None else torch.empty_like(probs)
    for copy, place in enumerate(sorted_indices.tolist()):
        token, number = divmod(copy, top_k)
        grad = grad_unpermuted_tokens[token]
        dpermuted[place] = grad if probs is None else grad * probs[token, number]
        if probs is not None and dprobs is not None:
            dprobs[token, number] = grad @ permuted_tokens[place]
    return dpermuted, dprobs
