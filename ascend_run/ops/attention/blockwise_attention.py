"""Attention with materialised scores, one block of queries at a time.

Supports biases, softcap and dropout. Backward recomputes the scores from the log-sum-exp, so that
only one block of them exists at any time. All arithmetic is float32 (float64 for float64 inputs).
The softcap applies to the scaled scores; the bias is added after it.
"""

# B batch, N query heads, G key-value heads, R = N/G, S queries of a block, J keys of a block

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_run.types.attention import AttentionSpec, Mask, PositionBias

from .visibility import QUERY_BLOCK, Rectangle, Shape, rectangles


def needs_scores(spec: AttentionSpec) -> bool:
    """Return whether a spec changes scores or probabilities in ways fused kernels do not
    support."""
    changes = (spec.bias, spec.position_bias, spec.softcap, spec.dropout)
    return any(change is not None for change in changes)


def learned_bias(spec: AttentionSpec) -> Tensor | None:
    """Return the bias that needs a gradient, or None; a mask passed as a bias needs none."""
    return spec.bias if spec.bias_requires_grad else None


def band(part: Rectangle, like: Tensor) -> Tensor:
    """Return the additive mask [S, J] of a rectangle in ``like``'s dtype: 0 if visible, else
    -inf."""
    rows = torch.arange(part.query_end - part.query_start, device=like.device)[:, None]
    columns = torch.arange(part.key_end - part.key_start, device=like.device)
    high = 0 if part.shape is Shape.CAUSAL else part.high
    hidden = columns > rows + high
    if part.shape is Shape.BAND:
        hidden |= columns < rows + part.low
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


def bias_of(bias: Tensor, part: Rectangle) -> Tensor:
    """Return a rectangle's slice of a bias (or of its gradient), with four dims. Dims of size 1 are
    not sliced. A view."""
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    queries = slice(None) if bias.shape[2] == 1 else part.queries
    keys = slice(None) if bias.shape[3] == 1 else part.keys
    return bias[:, :, queries, keys]


def distances(mask: Mask, part: Rectangle, like: Tensor) -> Tensor:
    """Return |query position - key position| in a rectangle, [S, J], in tokens."""
    first, last = part.query_start + mask.query_start, part.query_end + mask.query_start
    rows = torch.arange(first, last, device=like.device)
    first, last = part.key_start + mask.key_start, part.key_end + mask.key_start
    columns = torch.arange(first, last, device=like.device)
    return (rows[:, None] - columns).abs().to(like.dtype)


class _Scores:
    """Computes the scores of one call block by block, and what each block's gradient needs."""

    def __init__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.spec = spec
        self.groups = k.shape[1]
        self.q = q
        self.k = k.to(self.dtype)
        self.parts = rectangles(spec.mask, q.shape[2], k.shape[2], QUERY_BLOCK)

    def grouped(self, x_BNSD: Tensor) -> Tensor:
        """Reshape [B, N, S, D] to [B, G, R * S, D], so that one matmul covers all heads of a
        group."""
        batch, heads, length, width = x_BNSD.shape
        rows = heads // self.groups * length
        return x_BNSD.to(self.dtype).reshape(batch, self.groups, rows, width)

    def by_head(self, x_BGRSJ: Tensor, part: Rectangle) -> Tensor:
        """Invert ``grouped``."""
        batch, width = x_BGRSJ.shape[0], x_BGRSJ.shape[-1]
        return x_BGRSJ.reshape(batch, -1, part.query_end - part.query_start, width)

    def of(self, part: Rectangle) -> tuple[Tensor, Tensor | None]:
        """Return scores [B, N, S, J], and the capped scores before bias and mask (for its
        gradient)."""
        q = self.grouped(self.q[:, :, part.queries])
        scores = self.by_head(q @ self.k[:, :, part.keys].mT, part) * self.spec.scale
        capped = None
        if self.spec.softcap is not None:
            capped = scores = torch.tanh(scores / self.spec.softcap) * self.spec.softcap
        if self.spec.bias is not None:
            scores = scores + bias_of(self.spec.bias, part).to(self.dtype)
        if self.spec.position_bias is not None:
            scores = scores - self._slanted(self.spec.position_bias, part, scores)
        if part.shape is not Shape.FULL:
            scores = scores + band(part, scores)
        return scores, capped

    def _slanted(self, rules: PositionBias, part: Rectangle, like: Tensor) -> Tensor:
        """Return slope times distance, [N, S, J]."""
        away = distances(self.spec.mask, part, like)
        slopes = rules.slopes.to(device=like.device, dtype=like.dtype)
        return slopes[:, None, None] * (away.sqrt_() if rules.root else away)

    def keep_masks(self) -> Iterator[tuple[Rectangle, Tensor | None]]:
        """Yield each rectangle with its dropout factors, redrawn from the seed in a fixed order."""
        dropout = self.spec.dropout
        if dropout is None:
            yield from ((part, None) for part in self.parts)
            return
        generator = torch.Generator(device=self.q.device).manual_seed(dropout.seed)
        keep = 1.0 - dropout.probability
        for part in self.parts:
            rows, columns = part.query_end - part.query_start, part.key_end - part.key_start
            factors = self.q.new_empty((*self.q.shape[:2], rows, columns), dtype=self.dtype)
            yield part, factors.bernoulli_(keep, generator=generator).div_(keep or 1.0)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Compute attention without sinks, which the caller adds.

    Args:
        q: [B, N, S_q, D]; k: [B, G, S_k, D]; v: [B, G, S_k, E].

    Returns:
        out [B, N, S_q, E] in q's dtype, log-sum-exp [B, N, S_q] in float32 or float64.
    """
    scores = _Scores(q, k, spec)
    v = v.to(scores.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=scores.dtype)
    for part, factors in scores.keep_masks():
        block, _ = scores.of(part)
        block_lse = torch.logsumexp(block, dim=-1)
        probabilities = _probabilities(block, block_lse)
        if factors is not None:
            probabilities = probabilities * factors
        product = scores.grouped(probabilities) @ v[:, :, part.keys]
        out[:, :, part.queries] = scores.by_head(product, part).to(q.dtype)
        lse[:, :, part.queries] = block_lse
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, and of a bias that requires one; ``lse`` may include sinks."""
    scores = _Scores(q, k, spec)
    v_wide = v.to(scores.dtype)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(scores.k)
    dv = torch.zeros_like(v_wide)
    bias = learned_bias(spec)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=scores.dtype)
    for part, factors in scores.keep_masks():
        block, capped = scores.of(part)
        probabilities = _probabilities(block, lse[:, :, part.queries])
        kept = probabilities if factors is None else probabilities * factors
        dout_part = dout[:, :, part.queries]
        dout_rows = scores.grouped(dout_part)
        dv[:, :, part.keys] += scores.grouped(kept).mT @ dout_rows
        dkept = scores.by_head(dout_rows @ v_wide[:, :, part.keys].mT, part)
        dprobabilities = dkept if factors is None else dkept * factors
        out_part = out[:, :, part.queries].to(scores.dtype)
        dot = (dout_part.to(scores.dtype) * out_part).sum(-1, keepdim=True)
        dscores = probabilities * (dprobabilities - dot)
        if dbias is not None:
            target = bias_of(dbias, part)
            target += dscores.sum_to_size(target.shape)
        if capped is not None and spec.softcap is not None:
            dscores = dscores * (1.0 - (capped / spec.softcap).square())
        dscores_rows = scores.grouped(dscores * spec.scale)
        dq_rows = dscores_rows @ scores.k[:, :, part.keys]
        dq[:, :, part.queries] = scores.by_head(dq_rows, part).to(q.dtype)
        dk[:, :, part.keys] += dscores_rows.mT @ scores.grouped(q[:, :, part.queries])
    gradients = (dq, dk.to(k.dtype), dv.to(v.dtype))
    if bias is None or dbias is None:
        return gradients
    return *gradients, dbias.to(bias.dtype)


def bias_gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return the gradient of a bias alone, for kernels that return the others; without dropout."""
    assert spec.bias is not None
    assert spec.dropout is None
    scores = _Scores(q, k, spec)
    v = v.to(scores.dtype)
    dbias = torch.zeros_like(spec.bias, dtype=scores.dtype)
    for part in scores.parts:
        block, _ = scores.of(part)
        probabilities = _probabilities(block, lse[:, :, part.queries])
        rows = scores.grouped(dout[:, :, part.queries])
        dprobabilities = scores.by_head(rows @ v[:, :, part.keys].mT, part)
        dot = (dout[:, :, part.queries].to(scores.dtype) * out[:, :, part.queries]).sum(-1, True)
        target = bias_of(dbias, part)
        target += (probabilities * (dprobabilities - dot)).sum_to_size(target.shape)
    return dbias.to(spec.bias.dtype)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return ``exp(scores - lse)``; zeros for a query whose keys all have a bias of -inf."""
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    return (scores - safe.unsqueeze(-1)).exp()
