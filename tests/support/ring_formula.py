"""Attention by the formula, with a dense mask from positions; shares no code with plugins."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import contracts as c

# S queries, T keys, B batch, N query heads, G key-value heads, D and E widths


def positions(length: int, rank: int, size: int, cut: str) -> list[int]:
    """Return the positions that a rank holds, in order."""
    if cut == "contiguous":
        part = length // size
        return list(range(rank * part, (rank + 1) * part))
    part = length // (2 * size)
    early, late = rank, 2 * size - 1 - rank
    return [chunk * part + i for chunk in (early, late) for i in range(part)]


def seen(mask: c.Mask, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Return [S, T] bool: whether a query at this position sees a key at that one."""
    rows, columns = torch.tensor(queries)[:, None], torch.tensor(keys)[None]
    allowed = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if mask.causal:
        allowed &= columns <= rows
    if mask.window is not None:
        left, right = mask.window
        if left >= 0:
            allowed &= columns >= rows - left
        if right >= 0:
            allowed &= columns <= rows + right
    ends = torch.tensor(mask.document_ends or ())
    if len(ends):
        allowed &= torch.bucketize(rows, ends, right=True) == torch.bucketize(
            columns, ends, right=True
        )
    return allowed


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output [S, B, N, E] and log-sum-exp [B, N, S], differentiable; packed without B."""
    if q.dim() == 3:
        out, lse = attention(q[:, None], k[:, None], v[:, None], spec, allowed)
        return out.squeeze(1), lse.squeeze(0)
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.bias is not None:
        scores = scores + spec.bias
    if spec.position_bias is not None:
        scores = (
            scores - _distances(spec, *scores.shape[2:]) * spec.position_bias.slopes[:, None, None]
        )
    weights = scores.exp() * allowed
    total = weights.sum(-1)
    if spec.sinks is not None:
        total = total + spec.sinks.exp()[:, None]
    safe = torch.where(total == 0, 1.0, total)
    out = torch.einsum("bnst,tbne->sbne", weights / safe.unsqueeze(-1), v)
    return out, total.log()


def _distances(spec: c.AttentionSpec, num_queries: int, num_keys: int) -> Tensor:
    rows = spec.mask.query_start + torch.arange(num_queries, dtype=torch.float64)
    columns = spec.mask.key_start + torch.arange(num_keys, dtype=torch.float64)
    return (rows[:, None] - columns).abs()


class FormulaKernel:
    """contracts.AttentionKernel on blocks; backward uses the output and log-sum-exp it is given.

    Records every block, and fails for one without a single visible score.
    """

    features = c.AttentionFeatures(
        window=True,
        documents=True,
        position_bias=True,
        packed=True,
        unequal_lengths=True,
        unequal_widths=True,
    )

    def __init__(self, reads: frozenset[str] = frozenset({"q", "k", "v", "out", "lse"})) -> None:
        self.backward_reads = reads
        self.visible: list[int] = []
        """Number of visible scores of each forward block."""
        self.specs: list[c.AttentionSpec] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec) -> c.AttentionResult:
        allowed = self._allowed(q, k, spec)
        self.visible.append(int(allowed.sum()))
        out, lse = attention(q, k, v, spec, allowed)
        hidden = [
            x for name, x in (("q", q), ("k", k), ("v", v)) if name not in self.backward_reads
        ]
        return c.AttentionResult(out, lse, tuple(hidden))

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: c.AttentionSpec,
    ) -> tuple[Tensor, ...]:
        hidden = list(saved)
        q, k, v = (x if x is not None else hidden.pop(0) for x in (q, k, v))
        assert not hidden, "another block's tensors"
        assert out is not None
        assert lse is not None
        if q.dim() == 3:
            batched = (x[:, None] for x in (dout, q, k, v, out))
            gradients = self._gradients(*batched, lse[None], spec)
            return tuple(x.squeeze(1) for x in gradients)
        return self._gradients(dout, q, k, v, out, lse, spec)

    def _gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: c.AttentionSpec,
    ) -> tuple[Tensor, ...]:
        allowed = self._allowed(q, k, spec)
        groups, repeat = k.shape[2], q.shape[2] // k.shape[2]
        wide_k, wide_v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        scores = torch.einsum("sbnd,tbnd->bnst", q, wide_k) * spec.scale
        if spec.position_bias is not None:
            slopes = spec.position_bias.slopes[:, None, None]
            scores = scores - _distances(spec, *scores.shape[2:]) * slopes
        shift = torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)
        probabilities = (scores - shift).exp() * allowed
        dot = torch.einsum("sbne,sbne->bns", dout, out).unsqueeze(-1)
        dscores = probabilities * (torch.einsum("sbne,tbne->bnst", dout, wide_v) - dot)
        dq = torch.einsum("bnst,tbnd->sbnd", dscores, wide_k) * spec.scale
        dk = torch.einsum("bnst,sbnd->tbnd", dscores, q) * spec.scale
        dv = torch.einsum("bnst,sbne->tbne", probabilities, dout)
        return dq, *(x.unflatten(2, (groups, repeat)).sum(3) for x in (dk, dv))

    def _allowed(self, q: Tensor, k: Tensor, spec: c.AttentionSpec) -> Tensor:
        self.specs.append(spec)
        mask = spec.mask
        rows = range(mask.query_start, mask.query_start + q.shape[0])
        columns = range(mask.key_start, mask.key_start + k.shape[0])
        allowed = seen(mask, rows, columns)
        assert allowed.any(), "a block without a visible score"
        return allowed


@attrs.frozen(kw_only=True)
class Case:
    """One attention problem; every rank draws the same full tensors."""

    heads: int = 4
    groups: int = 4
    batch: int | None = 2
    """None is the packed layout."""
    length: int = 32
    key_length: int | None = None
    width: int = 4
    value_width: int = 4
    mask: c.Mask = attrs.field(factory=c.Mask)
    sinks: bool = False
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    """Its shape."""
    general_mask: bool = False
    """Whether the bias is a mask of 0 and -inf: some queries see a few keys, and some none."""
    bias_requires_grad: bool = True
    dropout: float = 0.0
    """Drop probability."""
    slopes: bool = False
    """Whether there is a position bias."""
    dtype: torch.dtype = torch.float64
    reads: frozenset[str] = frozenset({"q", "k", "v", "out", "lse"})
    """What the inner kernel's backward reads."""

    @property
    def spec(self) -> c.AttentionSpec:
        sinks = draw(self.heads, seed=9) if self.sinks else None
        slopes = 0.1 * (1 + torch.arange(self.heads, dtype=torch.float64))
        return c.AttentionSpec(
            scale=0.3,
            mask=self.mask,
            sinks=sinks,
            softcap=self.softcap,
            bias=self._bias(),
            bias_requires_grad=self.bias_requires_grad,
            position_bias=c.PositionBias(slopes=slopes) if self.slopes else None,
            dropout=c.Dropout(probability=self.dropout, seed=5) if self.dropout else None,
        )

    def _bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        drawn = draw(*self.bias, seed=8)
        if not self.general_mask:
            return drawn
        hidden = drawn < 0
        hidden[..., 3::9, :] = True
        return torch.zeros_like(drawn).masked_fill(hidden, -torch.inf)

    @property
    def num_keys(self) -> int:
        return self.key_length or self.length

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the full q, k, v and the gradient of the output."""
        batch = () if self.batch is None else (self.batch,)
        return (
            draw(self.length, *batch, self.heads, self.width, seed=1),
            draw(self.num_keys, *batch, self.groups, self.width, seed=2),
            draw(self.num_keys, *batch, self.groups, self.value_width, seed=3),
            draw(self.length, *batch, self.heads, self.value_width, seed=4),
        )


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
