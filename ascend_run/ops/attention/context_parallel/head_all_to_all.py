"""Ulysses: an attention kernel around another, with an all-to-all over heads before and after
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.blockwise_attention import learned_bias
from ascend_run.ops.attention.head_shares import HeadShare, head_shares
from ascend_run.ops.attention.log_sum_exp import as_column
from ascend_run.ops.transfer.all_to_all import sequence_to_heads
from ascend_run.types.attention import AttentionKernel, AttentionResult, AttentionSpec, Saved

from .inner import READABLE
from .kv_routing import AllToAllKv, Distribution, KvRouting
from .options import KvCache

# P ranks of the group; S full sequence, s of this rank; B micro-batch; N query heads and G
# key-value heads of all ranks, n and g of this one; D width of q and k, E width of v. Packed: T and
# t for S and s, no B.

_DROPPED: Final = {"full": (), "half": ("v",), "none": ("k", "v")}

Lengths = Callable[[int], Sequence[int]]
"""Maps this rank's sequence length to every rank's."""


class AllToAllSaved(NamedTuple, Generic[Saved]):
    """What backward needs in addition to its inputs."""

    num_keys: int
    """Keys on this rank."""
    num_groups: int
    """Key-value heads of all ranks."""
    kept: dict[str, Tensor]
    """Inputs of the inner kernel's backward, for the full sequence and this rank's heads, by
    name."""
    inner: Saved
    """What the inner kernel saved."""


class HeadAllToAll(AttentionKernel[AllToAllSaved[Saved]]):
    """AttentionKernel on [s, B, N, D] that runs ``inner`` on [S, B, n, D].

    Ranks take consecutive query heads, the first ones one more if P does not divide N, and the
    key-value heads that these need (``head_shares``): no head is repeated before it is sent.

    Communication: forward two all-to-alls (q, k and v; out and lse), backward two (dout; dq, dk and
    dv). If the lengths of q and k differ, q has an all-to-all of its own.
    Numerics: bitwise equal to ``inner`` for each head; gradients of a key-value head that several
    ranks share are summed in one reduction.
    Source: arXiv:2309.14509; sending each rank only the key-value heads that it needs is an
    addition of ascend-run.

    Args:
        keys: KV routing; default: in the all-to-all of the queries.
        kv_cache: Which of keys and values are saved for backward, if ``inner`` reads them there.
            The others are sent again from each rank's own k and v, in the all-to-all of dout.
        lengths: Sequence lengths if ranks hold unequal parts; default: all equal.
    """

    def __init__(
        self,
        inner: AttentionKernel[Saved],
        group: dist.ProcessGroup,
        *,
        keys: KvRouting | None = None,
        kv_cache: KvCache = "full",
        lengths: Lengths | None = None,
    ) -> None:
        self.inner, self.group, self.lengths = inner, group, lengths
        self.keys = keys or AllToAllKv()
        self.features = inner.features
        self.backward_reads = frozenset(_DROPPED[kv_cache]) & inner.backward_reads
        self._kept = [
            name for name in READABLE if name in inner.backward_reads - self.backward_reads
        ]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> AttentionResult[AllToAllSaved[Saved]]:
        distribution = self._distribution(q.shape[-2], k.shape[-2], q.shape[0], k.shape[0])
        full_q, full_k, full_v = self.keys.dispatch(q, k, v, distribution)
        full_out, full_lse, inner_saved = self.inner.forward(
            full_q,
            _repeated(full_k, distribution.share),
            _repeated(full_v, distribution.share),
            self._inner_spec(spec, distribution.share),
        )
        out, lse = sequence_to_heads(
            (full_out, as_column(full_lse)),
            self.group,
            head_ranges=(distribution.queries, distribution.queries),
            lengths=distribution.query_lengths,
        )
        whole = dict(zip(READABLE, (full_q, full_k, full_v, full_out, full_lse), strict=True))
        kept = {name: whole[name] for name in self._kept}
        if self.backward_reads:
            # A view would keep the receive buffer of all three alive.
            kept |= {name: kept[name].clone() for name in ("q", "k", "v") if name in kept}
        saved = AllToAllSaved(k.shape[0], k.shape[-2], kept, inner_saved)
        return AttentionResult(out, _from_column(lse), saved)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: AllToAllSaved[Saved],
        spec: AttentionSpec,
    ) -> tuple[Tensor, ...]:
        distribution = self._distribution(
            dout.shape[-2], saved.num_groups, dout.shape[0], saved.num_keys
        )
        unsaved = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
        full_dout, received = self.keys.redispatch(dout, unsaved, distribution)
        whole = saved.kept | received
        for name in ("k", "v"):
            if name in whole:
                whole[name] = _repeated(whole[name], distribution.share)
        dq, dk, dv, *extras = self.inner.backward(
            full_dout,
            whole.get("q"),
            whole.get("k"),
            whole.get("v"),
            whole.get("out"),
            whole.get("lse"),
            saved.inner,
            self._inner_spec(spec, distribution.share),
        )
        dk, dv = (_summed(x, distribution.share) for x in (dk, dv))
        gradients = self.keys.return_gradients(dq, dk, dv, distribution)
        given = (learned_bias(spec), -3), (spec.sinks, -1)
        full = [(x, axis) for x, axis in given if x is not None]
        return *gradients, *(
            _spread(extra, distribution.share, whole, axis)
            for extra, (whole, axis) in zip(extras, full, strict=True)
        )

    def _distribution(
        self, heads: int, groups: int, num_queries: int, num_keys: int
    ) -> Distribution:
        """Return the distribution of heads and sequence."""
        of_ranks = self.lengths or (lambda held: [held] * self.group.size())
        return Distribution(
            group=self.group,
            shares=head_shares(heads, groups, self.group.size()),
            query_lengths=of_ranks(num_queries),
            key_lengths=of_ranks(num_keys),
        )

    def _inner_spec(self, spec: AttentionSpec, share: HeadShare) -> AttentionSpec:
        """Return the spec over the full sequence, which starts at position 0."""
        mine, sinks, dropout = slice(*share.queries), spec.sinks, spec.dropout
        position_bias = spec.position_bias
        if position_bias is not None:
            position_bias = attrs.evolve(position_bias, slopes=position_bias.slopes[mine])
        if dropout is not None:
            # Ranks hold different heads: equal seeds would drop the same entries in all of them.
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


def _repeated(x: Tensor, share: HeadShare) -> Tensor:
    """Repeat the heads of [S, B, g, D] if query heads are shared unevenly."""
    if {*share.copies} == {1}:
        return x
    heads = x.split(1, dim=-2)
    return torch.cat([h for h, n in zip(heads, share.copies, strict=True) for _ in range(n)], -2)


def _summed(gradient: Tensor, share: HeadShare) -> Tensor:
    """Sum the gradients of repeated heads."""
    if {*share.copies} == {1}:
        return gradient
    copies = gradient.split(share.copies, dim=-2)
    return torch.cat([x.sum(-2, keepdim=True) for x in copies], dim=-2)


def _of_heads(x: Tensor, share: HeadShare, axis: int) -> Tensor:
    """Return this rank's heads along ``axis``; all of x if it has no such dim or it is 1."""
    if x.dim() < -axis or x.shape[axis] == 1:
        return x
    return x.narrow(axis, share.queries[0], share.num_queries)


def _spread(gradient: Tensor, share: HeadShare, whole: Tensor, axis: int) -> Tensor:
    """Return the gradient in the shape of ``whole``, zero for the heads of other ranks."""
    if gradient.shape == whole.shape:
        return gradient
    spread = torch.zeros_like(whole)
    _of_heads(spread, share, axis).copy_(gradient)
    return spread


def _from_column(lse: Tensor) -> Tensor:
    """Reshape [s, B, N, 1] to [B, N, s]."""
    return lse.squeeze(-1).movedim(0, -1)
