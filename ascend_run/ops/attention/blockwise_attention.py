"""Attention whose scores are at hand: biases, softcap and dropout, a block of queries at a time.

The scores are computed again in backward, from the log-sum-exp, so that only one block of them
exists at any time. All arithmetic is float32 (float64 for float64 inputs). A softcap bounds the
scaled scores first; the bias is added after it.
"""

# B batch, N query heads, G key-value heads, R = N/G, S queries of a block, J keys of a block

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .visibility import QUERY_BLOCK, MaskRules, Rectangle, Shape, rectangles


class DropoutRules(Protocol):
    """What is read of plugin_api's Dropout."""

    @property
    def probability(self) -> float: ...
    @property
    def seed(self) -> int: ...


class PositionRules(Protocol):
    """What is read of plugin_api's PositionBias."""

    @property
    def slopes(self) -> Tensor: ...
    @property
    def root(self) -> bool: ...


class ScoreRules(Protocol):
    """What is read of plugin_api's AttentionSpec, which says what each field means."""

    @property
    def scale(self) -> float: ...
    @property
    def mask(self) -> MaskRules: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def bias_requires_grad(self) -> bool: ...
    @property
    def position_bias(self) -> PositionRules | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def dropout(self) -> DropoutRules | None: ...


def needs_scores(spec: ScoreRules) -> bool:
    """Whether a spec changes scores or probabilities in ways that fused kernels cannot follow."""
    changes = (spec.bias, spec.position_bias, spec.softcap, spec.dropout)
    return any(change is not None for change in changes)


def learned_bias(spec: ScoreRules) -> Tensor | None:
    """The bias whose gradient backward answers; a mask that is given as a bias has none."""
    return spec.bias if spec.bias_requires_grad else None


def band(part: Rectangle, like: Tensor) -> Tensor:
    """The additive mask [S, J] of a rectangle: 0 where visible, else -inf; in ``like``'s dtype."""
    rows = torch.arange(part.query_end - part.query_start, device=like.device)[:, None]
    columns = torch.arange(part.key_end - part.key_start, device=like.device)
    high = 0 if part.shape is Shape.CAUSAL else part.high
    hidden = columns > rows + high
    if part.shape is Shape.BAND:
        hidden |= columns < rows + part.low
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)


def bias_of(bias: Tensor, part: Rectangle) -> Tensor:
    """A rectangle's part of a bias or of its gradient, with four axes; of an axis of one entry that
    one. A view."""
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    queries = slice(None) if bias.shape[2] == 1 else part.queries
    keys = slice(None) if bias.shape[3] == 1 else part.keys
    return bias[:, :, queries, keys]


def distances(mask: MaskRules, part: Rectangle, like: Tensor) -> Tensor:
    """How far apart the positions of a rectangle's queries and keys are, [S, J], at least 0."""
    first, last = part.query_start + mask.query_start, part.query_end + mask.query_start
    rows = torch.arange(first, last, device=like.device)
    first, last = part.key_start + mask.key_start, part.key_end + mask.key_start
    columns = torch.arange(first, last, device=like.device)
    return (rows[:, None] - columns).abs().to(like.dtype)


class _Scores:
    """The scores of one call, block by block, with what each block's gradient needs."""

    def __init__(self, q: Tensor, k: Tensor, spec: ScoreRules) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.spec = spec
        self.groups = k.shape[1]
        self.q = q
        self.k = k.to(self.dtype)
        self.parts = rectangles(spec.mask, q.shape[2], k.shape[2], QUERY_BLOCK)

    def grouped(self, x_BNSD: Tensor) -> Tensor:
        """[B, N, S, D] -> [B, G, R * S, D]: the heads of one group are rows of one product."""
        batch, heads, length, width = x_BNSD.shape
        rows = heads // self.groups * length
        return x_BNSD.to(self.dtype).reshape(batch, self.groups, rows, width)

    def by_head(self, x_BGRSJ: Tensor, part: Rectangle) -> Tensor:
        """The inverse of ``grouped``."""
        batch, width = x_BGRSJ.shape[0], x_BGRSJ.shape[-1]
        return x_BGRSJ.reshape(batch, -1, part.query_end - part.query_start, width)

    def of(self, part: Rectangle) -> tuple[Tensor, Tensor | None]:
        """Scores [B, N, S, J], and the capped ones before bias and mask (for the cap's slope)."""
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

    def _slanted(self, rules: PositionRules, part: Rectangle, like: Tensor) -> Tensor:
        """Slope times distance, [N, S, J]."""
        away = distances(self.spec.mask, part, like)
        slopes = rules.slopes.to(device=like.device, dtype=like.dtype)
        return slopes[:, None, None] * (away.sqrt_() if rules.root else away)

    def keep_masks(self) -> Iterator[tuple[Rectangle, Tensor | None]]:
        """Each rectangle with its dropout factors, drawn anew from the seed in the same order."""
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


def forward(q: Tensor, k: Tensor, v: Tensor, spec: ScoreRules) -> tuple[Tensor, Tensor]:
    """Attend; without sinks, which the caller adds.

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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ScoreRules
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, then of a bias that requires one; ``lse`` may include sinks."""
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
        if capped is not None:
            dscores = dscores * (1.0 - (capped / spec.softcap).square())
        dscores_rows = scores.grouped(dscores * spec.scale)
        dq_rows = dscores_rows @ scores.k[:, :, part.keys]
        dq[:, :, part.queries] = scores.by_head(dq_rows, part).to(q.dtype)
        dk[:, :, part.keys] += dscores_rows.mT @ scores.grouped(q[:, :, part.queries])
    gradients = (dq, dk.to(k.dtype), dv.to(v.dtype))
    return gradients if dbias is None else (*gradients, dbias.to(bias.dtype))


def bias_gradient(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ScoreRules
) -> Tensor:
    """The gradient of a bias alone, for a kernel that answers the others; without dropout."""
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
    """``exp(scores - lse)``; zeros for a query whose every key has a bias of -inf."""
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    return (scores - safe.unsqueeze(-1)).exp()
