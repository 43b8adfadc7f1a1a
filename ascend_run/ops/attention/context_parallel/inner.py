"""Runs the inner kernel on blocks of a shared sequence's attention."""

from __future__ import annotations

import attrs
from torch import Tensor

from ascend_run.types.attention import AttentionKernel, AttentionSpec, Saved

from .blocks import Block

READABLE = ("q", "k", "v", "out", "lse")
"""What a kernel's backward may read, in argument order."""


def missing_features(inner: AttentionKernel) -> list[str]:
    """Return the reasons why a kernel cannot compute blocks of the keys; empty if it can."""
    found = [
        f"its backward does not read {name}, so it would normalise over the block's keys only"
        for name in ("out", "lse")
        if name not in inner.backward_reads
    ]
    if not inner.features.unequal_lengths:
        found.append("it requires as many keys as queries")
    return found


def block_spec(spec: AttentionSpec, block: Block, index: int, bias: Tensor | None) -> AttentionSpec:
    """Return one block's spec, without the sinks, which are added after the merge.

    Args:
        index: Index of the block among those of all ranks, the dropout seed: equal seeds would drop
            the same entries in each.
        bias: The block's slice of the bias.
    """
    dropout = spec.dropout
    if dropout is not None:
        dropout = attrs.evolve(dropout, seed=index % 2**62)
    return attrs.evolve(spec, mask=block.mask, bias=bias, sinks=None, dropout=dropout)


def block_backward(
    inner: AttentionKernel[Saved],
    block: Block,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    saved: Saved,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv, and the gradient of a bias that requires one) of one block.

    Args:
        rows: dout, q, out and the log-sum-exp of all of this rank's queries.
        keys, values: The block's own.
        saved: What the kernel saved in the block's forward.
    """
    dout, q, out = (x[block.rows] for x in rows[:3])
    lse = rows[3][..., block.rows].contiguous()  # kernels require contiguous rows
    given = zip(READABLE, (q, keys, values, out, lse), strict=True)
    read = (x if name in inner.backward_reads else None for name, x in given)
    read_q, read_k, read_v, read_out, read_lse = read
    return inner.backward(dout, read_q, read_k, read_v, read_out, read_lse, saved, spec)
