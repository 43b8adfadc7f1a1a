"""Blocks of a shared sequence's attention, and the kernel that computes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from .blocks import Block

READABLE = ("q", "k", "v", "out", "lse")
"""What a kernel's backward may read, in the order in which it is given."""

Spec = Any
"""plugin_api's AttentionSpec, which says what each field means."""


def lacking(inner: Any) -> list[str]:
    """Why a kernel cannot compute blocks of the keys; empty where it can."""
    found = [
        f"its backward does not read {name}, and would take a part for the whole softmax"
        for name in ("out", "lse")
        if name not in inner.backward_reads
    ]
    if not inner.features.unequal_lengths:
        found.append("it takes only as many keys as queries")
    return found


def block_spec(spec: Spec, block: Block, place: int, bias: Tensor | None) -> Spec:
    """One block's part of an attention, without the sinks, which come in after the merge.

    Args:
        place: Of the block among all of all ranks: equal seeds would drop the same places in each.
        bias: The block's part of it.
    """
    dropout = spec.dropout
    if dropout is not None:
        dropout = attrs.evolve(dropout, seed=place % 2**62)
    return attrs.evolve(spec, mask=block.mask, bias=bias, sinks=None, dropout=dropout)


def block_backward(
    inner: Any,
    block: Block,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    saved: tuple[Tensor, ...],
    spec: Spec,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, and that of a bias that requires one) of one block.

    Args:
        rows: dout, q, out and the log-sum-exp of all of this rank's queries.
        keys, values: The block's own.
        saved: What the kernel kept of the block's forward.
    """
    dout, q, out = (x[block.rows] for x in rows[:3])
    lse = rows[3][..., block.rows].contiguous()  # kernels want rows without gaps
    given = zip(READABLE, (q, keys, values, out, lse), strict=True)
    read = (x if name in inner.backward_reads else None for name, x in given)
    gradients: tuple[Tensor, ...] = inner.backward(dout, *read, saved, spec)
    return gradients


def by_block(
    tensors: Sequence[Tensor], steps: Sequence[Sequence[Block]]
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """What the inner kernel saved, equally many tensors a block: (step, index) -> its own."""
    places = [(step, index) for step, blocks in enumerate(steps) for index in range(len(blocks))]
    each = len(tensors) // max(len(places), 1)
    return {place: tuple(tensors[i * each : (i + 1) * each]) for i, place in enumerate(places)}
