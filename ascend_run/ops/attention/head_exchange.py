"""An attention kernel around another: heads for sequence on the way in, and back on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.all_to_all import sequence_to_heads

from .blockwise_attention import learned_bias
from .head_shares import HeadShare, head_shares
from .key_roads import ExchangedKeys, KeyRoad, Places
from .kv_cache import KvCache

# P ranks of the group; S whole sequence, s of this rank; B micro-batch; N query heads and G
# key-value heads of all ranks, n and g of this one; D width of q and k, E width of v. Packed: T and
# t for S and s, no B.

_READABLE: Final = ("q", "k", "v", "out", "lse")
_DROPPED: Final = {"full": (), "half": ("v",), "none": ("k", "v")}

Spec = Any
"""plugin_api's AttentionSpec, which says what each field means."""

Lengths = Callable[[int], Sequence[int]]
"""What every rank holds of a sequence, by what this one holds of it."""


class HeadExchange:
    """plugin_api's AttentionKernel on [s, B, N, D], by ``inner`` on [S, B, n, D].

    Ranks take consecutive query heads, the first ones one more where P does not divide N, and the
    key-value heads that these need (``head_shares``): no head is repeated before it is sent.

    Messages: forward two (q, k and v; out and lse), backward two (dout; dq, dk and dv). Where the
    lengths of q and k differ, q travels apart from k and v.
    Numerics: bitwise what ``inner`` gives for each head; sums over the ranks that share a key-value
    head are taken at once.
    Source: arXiv:2309.14509; sending to each rank the key-value heads that it needs is ours.

    Args:
        keys: How keys and values travel; default: in the message of the queries.
        kv_cache: What is kept of them from forward to backward, where ``inner`` reads them there.
            What is not comes again from this rank's own k and v, in the message of dout.
        lengths: Where ranks hold parts of different lengths; default: all the same.
    """

    def __init__(
        self,
        inner: Any,
        group: dist.ProcessGroup,
        *,
        keys: KeyRoad | None = None,
        kv_cache: KvCache = "full",
        lengths: Lengths | None = None,
    ) -> None:
        self.inner, self.group, self.lengths = inner, group, lengths
        self.keys = keys or ExchangedKeys()
        self.features = inner.features
        self.backward_reads = frozenset(_DROPPED[kv_cache]) & inner.backward_reads
        self._kept = [
            name for name in _READABLE if name in inner.backward_reads - self.backward_reads
        ]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: Spec
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        places = self._places(q.shape[-2], k.shape[-2], q.shape[0], k.shape[0])
        whole_q, whole_k, whole_v = self.keys.bring(q, k, v, places)
        whole_out, whole_lse, inner_saved = self.inner.forward(
            whole_q,
            _copied(whole_k, places.share),
            _copied(whole_v, places.share),
            self._inner_spec(spec, places.share),
        )
        out, lse = sequence_to_heads(
            (whole_out, _as_column(whole_lse)),
            self.group,
            cuts=(places.queries, places.queries),
            lengths=places.query_lengths,
        )
        whole = dict(zip(_READABLE, (whole_q, whole_k, whole_v, whole_out, whole_lse), strict=True))
        kept = [whole[name] for name in self._kept]
        if self.backward_reads:
            # A view would hold the buffer that all three came in.
            inputs = (whole_q, whole_k, whole_v)
            kept = [x.clone() if any(x is y for y in inputs) else x for x in kept]
        # Backward sees no k, but must know how many heads and rows it has: as a shape.
        shape_of_k = k.new_empty((k.shape[0], k.shape[-2], 0))
        return out, _from_column(lse), (shape_of_k, *kept, *inner_saved)

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
        shape_of_k, *rest = saved
        num_keys, num_groups, _ = shape_of_k.shape
        places = self._places(dout.shape[-2], num_groups, dout.shape[0], num_keys)
        whole: dict[str, Tensor | None] = dict(zip(self._kept, rest, strict=False))
        inner_saved = tuple(rest[len(self._kept) :])
        again = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
        whole_dout, came = self.keys.bring_again(dout, again, places)
        whole |= came
        for name in ("k", "v"):
            if (x := whole.get(name)) is not None:
                whole[name] = _copied(x, places.share)
        dq, dk, dv, *extras = self.inner.backward(
            whole_dout,
            *(whole.get(name) for name in _READABLE),
            inner_saved,
            self._inner_spec(spec, places.share),
        )
        dk, dv = (_summed(x, places.share) for x in (dk, dv))
        gradients = self.keys.take_back(dq, dk, dv, places)
        given = (learned_bias(spec), -3), (spec.sinks, -1)
        wholes = [(x, axis) for x, axis in given if x is not None]
        return *gradients, *(
            _spread(extra, places.share, whole, axis)
            for extra, (whole, axis) in zip(extras, wholes, strict=True)
        )

    def _places(self, heads: int, groups: int, num_queries: int, num_keys: int) -> Places:
        """Who has what, of the heads and of the sequence."""
        of_ranks = self.lengths or (lambda held: [held] * self.group.size())
        return Places(
            group=self.group,
            shares=head_shares(heads, groups, self.group.size()),
            query_lengths=of_ranks(num_queries),
            key_lengths=of_ranks(num_keys),
        )

    def _inner_spec(self, spec: Spec, share: HeadShare) -> Spec:
        """The same attention over the whole sequence, which starts at position 0."""
        mine, sinks, dropout = slice(*share.queries), spec.sinks, spec.dropout
        position_bias = spec.position_bias
        if position_bias is not None:
            position_bias = attrs.evolve(position_bias, slopes=position_bias.slopes[mine])
        if dropout is not None:
            # Ranks hold different heads: equal seeds would drop the same places in all of them.
            rank, size = self.group.rank(), self.group.size()
            dropout = attrs.evolve(dropout, seed=(dropout.seed * size + rank) % 2**62)
        return attrs.evolve(
            spec,
            mask=attrs.evolve(spec.mask, query_start=0, key_start=0),
            bias=None if spec.bias is None else _of_heads(spec.bias, share, -3),
            sinks=None if sinks is None else sinks[mine],
            position_bias=position_bias,
            dropout=dropout,
        )


def _copied(x: Tensor, share: HeadShare) -> Tensor:
    """[S, B, g, D] with as many query heads to each: only where heads are shared unevenly."""
    if {*share.copies} == {1}:
        return x
    heads = x.split(1, dim=-2)
    return torch.cat([h for h, n in zip(heads, share.copies, strict=True) for _ in range(n)], -2)


def _summed(gradient: Tensor, share: HeadShare) -> Tensor:
    """Back from the copies: a head's gradient is the sum of theirs."""
    if {*share.copies} == {1}:
        return gradient
    copies = gradient.split(share.copies, dim=-2)
    return torch.cat([x.sum(-2, keepdim=True) for x in copies], dim=-2)


def _of_heads(x: Tensor, share: HeadShare, axis: int) -> Tensor:
    """This rank's heads of what has some along an axis; all of what has none."""
    if x.dim() < -axis or x.shape[axis] == 1:
        return x
    return x.narrow(axis, share.queries[0], share.num_queries)


def _spread(gradient: Tensor, share: HeadShare, whole: Tensor, axis: int) -> Tensor:
    """In the shape of the whole: this rank's heads; the others' are on the ranks that hold them."""
    if gradient.shape == whole.shape:
        return gradient
    spread = torch.zeros_like(whole)
    _of_heads(spread, share, axis).copy_(gradient)
    return spread


def _as_column(lse: Tensor) -> Tensor:
    """[B, n, S] -> [S, B, n, 1], or [n, T] -> [T, n, 1]: the layout of an output of width 1."""
    return lse.movedim(-1, 0).unsqueeze(-1)


def _from_column(lse: Tensor) -> Tensor:
    """[s, B, N, 1] -> [B, N, s]."""
    return lse.squeeze(-1).movedim(0, -1)
