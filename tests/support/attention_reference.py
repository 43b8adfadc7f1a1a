"""Attention from its formula, for autograd: shares no code with the kernel."""

# S queries, J keys, B batch, N query heads, G key-value heads, D width of q and k, E width of v

from __future__ import annotations

import torch
from torch import Tensor

from ascend_run.plugin_api import AttentionSpec, Mask


def visible(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    """Return which keys each query sees, [S, J] bool: every rule, for every pair."""
    query = torch.arange(num_queries)[:, None] + mask.query_start
    key = torch.arange(num_keys)[None, :] + mask.key_start
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if mask.causal:
        seen &= key <= query
    left, right = mask.window or (-1, -1)
    if left >= 0:
        seen &= query - key <= left
    if right >= 0:
        seen &= key - query <= right
    for end in mask.document_ends or ():
        seen &= (query < end) == (key < end)
    return seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [S, B, N, E] and log-sum-exp [B, N, S].

    Args:
        kept: Dropout factors [B, N, S, J] on the probabilities.
    """
    heads = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(heads, dim=2) for t in (k, v))
    scores = spec.scale * torch.einsum("sbnd,jbnd->bnsj", q, k)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.bias is not None:
        scores = scores + spec.bias
    if spec.position_bias is not None:
        query = torch.arange(q.shape[0])[:, None] + spec.mask.query_start
        away = (query - torch.arange(k.shape[0]) - spec.mask.key_start).abs().to(scores.dtype)
        away = away**0.5 if spec.position_bias.root else away
        slopes = spec.position_bias.slopes.to(scores.dtype)
        scores = scores - torch.einsum("n,sj->nsj", slopes, away)
    seen = visible(spec.mask, q.shape[0], k.shape[0]) & (scores != -torch.inf)
    largest = scores.detach().masked_fill(~seen, -1e4).amax(-1, keepdim=True)
    largest = torch.where(seen.any(-1, keepdim=True), largest, 0.0)
    terms = torch.exp(scores - largest) * seen
    total = terms.sum(-1, keepdim=True)
    if spec.sinks is not None:
        total = total + torch.exp(spec.sinks[:, None, None] - largest)
    blind = total == 0
    probabilities = terms / total.masked_fill(blind, 1.0)
    lse = torch.where(blind, -torch.inf, total.masked_fill(blind, 1.0).log() + largest)
    if kept is not None:
        probabilities = probabilities * kept
    return torch.einsum("bnsj,jbne->sbne", probabilities, v), lse.squeeze(-1)
