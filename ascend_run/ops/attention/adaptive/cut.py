"""A sequence's cut that follows from the mask. No torch: ``plan`` shows it too."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from ascend_run.ops.attention.ring_attention.cut import Span

from .coarse_mask import coarse_mask
from .remap import remapped


@attrs.frozen(kw_only=True)
class Remapped:
    """plugin_api's DocumentPartition: every rank holds some chunks of equal length, so that each
    has as much to do under this mask as can be (``remap``)."""

    multiple: int
    """Chunks of a rank."""
    window: tuple[int, int] | None = None
    causal: bool = True
    document_ends: tuple[int, ...] | None = None

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[Span]:
        """With neighbours joined."""
        return _held(self, seq_length, size)[rank]

    def of_documents(self, document_ends: tuple[int, ...]) -> Remapped:
        return attrs.evolve(self, document_ends=document_ends)


@functools.lru_cache(maxsize=64)
def _held(cut: Remapped, seq_length: int, size: int) -> tuple[tuple[Span, ...], ...]:
    num_chunks = cut.multiple * size
    assert seq_length % num_chunks == 0, "a sequence that the ranks cannot share"
    length = seq_length // num_chunks
    held: list[list[Span]] = [[] for _ in range(size)]
    for chunk, rank in enumerate(remapped(coarse_mask(cut, seq_length, num_chunks), size)):
        spans, start = held[rank], chunk * length
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, (chunk + 1) * length))
    return tuple(tuple(spans) for spans in held)
