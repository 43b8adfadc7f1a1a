"""An attention kernel around another: heads for sequence on the way in, and back on the way out."""

from __future__ import annotations

import math
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist

from .all_to_all import heads_to_sequence, sequence_to_heads

# P ranks of the group; S whole sequence, s = S / P; B micro-batch; N query heads and G key-value
# heads before the exchange; D width of q and k, E width of v. Packed: T and t for S and s, no B.

_READABLE = ("q", "k", "v", "out", "lse")

Spec = Any
"""plugin_api's AttentionSpec, which says what each field means."""


class HeadExchange:
    """plugin_api's AttentionKernel on [s, B, N, D], by ``inner`` on [S, B, N/P, D].

    Where P does not divide G, key-value heads are repeated to the least common multiple of G and P
    (to P, in the usual case) and not to N.

    Messages: forward two (q, k and v; out and lse), backward two (dout; dq, dk and dv). Where the
    lengths of q and k differ, q travels apart from k and v.
    Numerics: bitwise what ``inner`` gives for each head.
    Source: arXiv:2309.14509; repeating to P heads is ours.
    """

    backward_reads: frozenset[str] = frozenset()

    def __init__(self, inner: Any, group: dist.ProcessGroup) -> None:
        self.inner, self.group = inner, group
        # A bias would have to be cut along its heads while its queries are this rank's only.
        self.features = attrs.evolve(inner.features, bias=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        repeat = _repeats(k.shape[-2], self.group.size())
        if q.shape[0] == k.shape[0]:
            whole_q, whole_k, whole_v = heads_to_sequence(
                (q, k, v), self.group, repeats=(1, repeat, repeat)
            )
        else:
            (whole_q,) = heads_to_sequence((q,), self.group)
            whole_k, whole_v = heads_to_sequence((k, v), self.group, repeats=(repeat, repeat))
        whole_out, whole_lse, inner_saved = self.inner.forward(
            whole_q, whole_k, whole_v, self._inner_spec(spec)
        )
        out, lse = sequence_to_heads((whole_out, _as_column(whole_lse)), self.group)
        candidates = dict(
            zip(_READABLE, (whole_q, whole_k, whole_v, whole_out, whole_lse), strict=True)
        )
        kept = [candidates[name] for name in _READABLE if name in self.inner.backward_reads]
        # Backward sees no k, but must know how often its heads were repeated: as a shape.
        repeat_carrier = k.new_empty((repeat, 0))
        return out, _from_column(lse), (repeat_carrier, *kept, *inner_saved)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: Spec,
    ) -> tuple[Tensor, ...]:
        reads = [name for name in _READABLE if name in self.inner.backward_reads]
        repeat_carrier, *rest = saved
        kept, inner_saved = dict(zip(reads, rest, strict=False)), tuple(rest[len(reads) :])
        (whole_dout,) = heads_to_sequence((dout,), self.group)
        dq, dk, dv, *extras = self.inner.backward(
            whole_dout,
            *(kept.get(name) for name in _READABLE),
            inner_saved,
            self._inner_spec(spec),
        )
        if dq.shape[0] == dk.shape[0]:
            dq, dk, dv = sequence_to_heads((dq, dk, dv), self.group)
        else:
            (dq,) = sequence_to_heads((dq,), self.group)
            dk, dv = sequence_to_heads((dk, dv), self.group)
        repeat = repeat_carrier.shape[0]
        return dq, _sum_repeats(dk, repeat), _sum_repeats(dv, repeat), *map(self._spread, extras)

    def _inner_spec(self, spec: Spec) -> Spec:
        """The same attention over the whole sequence, which starts at position 0."""
        rank, size = self.group.rank(), self.group.size()
        sinks, dropout = spec.sinks, spec.dropout
        if sinks is not None:
            sinks = sinks.chunk(size)[rank]
        position_bias = spec.position_bias
        if position_bias is not None:
            slopes = position_bias.slopes.chunk(size)[rank]
            position_bias = attrs.evolve(position_bias, slopes=slopes)
        if dropout is not None:
            # Ranks hold different heads: equal seeds would drop the same places in all of them.
            dropout = attrs.evolve(dropout, seed=(dropout.seed * size + rank) % 2**62)
        mask = attrs.evolve(spec.mask, query_start=0, key_start=0)
        return attrs.evolve(
            spec, mask=mask, sinks=sinks, position_bias=position_bias, dropout=dropout
        )

    def _spread(self, dsinks: Tensor) -> Tensor:
        """[N / P] -> [N]: this rank's heads; the others' are on the ranks that hold them."""
        rank, size = self.group.rank(), self.group.size()
        whole = dsinks.new_zeros(dsinks.shape[0] * size)
        whole.chunk(size)[rank].copy_(dsinks)
        return whole


def _repeats(groups: int, size: int) -> int:
    """How often a key-value head must be repeated for ``size`` ranks to hold as many each."""
    return math.lcm(groups, size) // groups


def _sum_repeats(gradient: Tensor, repeat: int) -> Tensor:
    """[s, B, G * repeat, D] -> [s, B, G, D]: a head's gradient is the sum of its copies'."""
    return gradient if repeat == 1 else gradient.unflatten(-2, (-1, repeat)).sum(-2)


def _as_column(lse: Tensor) -> Tensor:
    """[B, n, S] -> [S, B, n, 1], or [n, T] -> [T, n, 1]: the layout of an output of width 1."""
    return lse.movedim(-1, 0).unsqueeze(-1)


def _from_column(lse: Tensor) -> Tensor:
    """[s, B, N, 1] -> [B, N, s]."""
    return lse.squeeze(-1).movedim(0, -1)
