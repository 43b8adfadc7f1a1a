"""An attention kernel around another: all of the sequence inside, a part of it outside."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.plugin_api import AttentionFeatures, AttentionKernel, AttentionResult, AttentionSpec

# P ranks of the group; S whole sequence, s = S / P; B micro-batch (no axis where packed); N query
# heads and G key-value heads before the exchange, n = N / P; D width of q and k, E width of v.
# Outside tensors are [s, B, N, D] and a log-sum-exp [B, N, s]; inside [S, B, n, D] and [B, n, S].

SEQUENCE, HEADS = 0, -2
LSE_SEQUENCE, LSE_HEADS = -1, -2
_NAMES = ("q", "k", "v", "out", "lse")


def exchange(x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Cut dimension ``cut`` into P parts, one for each rank, and join what arrives along ``join``.

    One message. Numerics: bitwise.
    """
    parts = [part.contiguous() for part in x.chunk(group.size(), cut)]
    arrived = [torch.empty_like(part) for part in parts]
    dist.all_to_all(arrived, parts, group=group)
    return torch.cat(arrived, join)


class Saved(NamedTuple):
    """What backward needs; autograd keeps the tensors in it."""

    copies: int
    """Of each key-value head: backward is given no k that would say it."""
    kept: dict[str, Tensor]
    """What the inner kernel reads, by its name."""
    inner: tuple[Any, ...]


class HeadExchangeKernel(AttentionKernel[Saved]):
    """contracts.AttentionKernel on this rank's part of the sequence.

    Where P does not divide G, each key-value head is copied for every query head that reads it.
    """

    backward_reads: frozenset[str] = frozenset()

    def __init__(self, inner: AttentionKernel, group: dist.ProcessGroup) -> None:
        self.inner, self.group = inner, group
        self.features = inner.features & AttentionFeatures.all_but("bias", "position_bias")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[Saved]:
        copies = 1 if k.shape[HEADS] % self.group.size() == 0 else q.shape[HEADS] // k.shape[HEADS]
        k, v = (x.repeat_interleave(copies, HEADS) for x in (k, v))
        q, k, v = (self._to_heads(x) for x in (q, k, v))
        out, lse, inner_saved = self.inner.forward(q, k, v, self._inside(spec))
        named = dict(zip(_NAMES, (q, k, v, out, lse), strict=True))
        kept = {name: named[name] for name in _NAMES if name in self.inner.backward_reads}
        return AttentionResult(
            self._to_sequence(out),
            exchange(lse, LSE_SEQUENCE, LSE_HEADS, self.group),
            Saved(copies, kept, inner_saved),
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: Saved,
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse = (saved.kept.get(name) for name in _NAMES)
        dq, dk, dv, *extras = self.inner.backward(
            self._to_heads(dout), q, k, v, out, lse, saved.inner, self._inside(spec)
        )
        copies = (-1, saved.copies)
        dk, dv = (self._to_sequence(x).unflatten(HEADS, copies).sum(HEADS) for x in (dk, dv))
        return self._to_sequence(dq), dk, dv, *map(self._among_all_heads, extras)

    def _to_heads(self, x: Tensor) -> Tensor:
        return exchange(x, HEADS, SEQUENCE, self.group)

    def _to_sequence(self, x: Tensor) -> Tensor:
        return exchange(x, SEQUENCE, HEADS, self.group)

    def _inside(self, spec: AttentionSpec) -> AttentionSpec:
        """The same attention for this rank's heads over the whole sequence."""
        rank, size = self.group.rank(), self.group.size()
        sinks, dropout = spec.sinks, spec.dropout
        if sinks is not None:
            sinks = sinks.chunk(size)[rank]
        if dropout is not None:  # the ranks hold different heads, which drop different places
            dropout = attrs.evolve(dropout, seed=(dropout.seed + rank * 2**40) % 2**62)
        mask = attrs.evolve(spec.mask, query_start=0, key_start=0)
        return attrs.evolve(spec, mask=mask, sinks=sinks, dropout=dropout)

    def _among_all_heads(self, dsinks: Tensor) -> Tensor:
        """[n] -> [N], zero for the heads of other ranks, which hold their gradients themselves."""
        parts = [torch.zeros_like(dsinks) for _ in range(self.group.size())]
        parts[self.group.rank()] = dsinks
        return torch.cat(parts)
