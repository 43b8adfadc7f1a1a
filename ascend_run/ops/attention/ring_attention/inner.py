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


def read_by(inner: Any, tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
    """q, k, v, out and lse, as far as the kernel's backward reads them."""
    reads = inner.backward_reads
    return [x if name in reads else None for name, x in zip(READABLE, tensors, strict=True)]


def by_block(
    tensors: Sequence[Tensor], steps: Sequence[Sequence[Block]]
) -> dict[tuple[int, int], tuple[Tensor, ...]]:
    """What the inner kernel saved, equally many tensors a block: (step, index) -> its own."""
    places = [(step, index) for step, blocks in enumerate(steps) for index in range(len(blocks))]
    each = len(tensors) // max(len(places), 1)
    return {place: tuple(tensors[i * each : (i + 1) * each]) for i, place in enumerate(places)}
