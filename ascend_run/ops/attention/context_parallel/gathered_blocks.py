"""The parts of the score matrix that a rank computes after an all-gather. No torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from ascend_run.ops.attention.visibility import seen_keys
from ascend_run.types.attention import Mask, SequencePartition, partition_of

from .blocks import Block, blocks
from .partitions import Span


@attrs.frozen
class Source:
    """A range of keys on one rank."""

    rank: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.end)


@attrs.frozen
class GatheredBlock:
    """A block, and the sources whose concatenation is its keys."""

    block: Block
    """Its key indices count this rank's own keys, or the other ranks' keys in position order."""
    sources: tuple[Source, ...]


@attrs.frozen
class GatheredWork:
    """The blocks one rank computes."""

    rank: int
    own: tuple[GatheredBlock, ...]
    """Blocks with this rank's own keys, which need no communication."""
    others: tuple[GatheredBlock, ...]
    queries: tuple[Span, ...]
    """Positions of its queries; ``own_keys`` and ``other_keys`` alike."""
    own_keys: tuple[Span, ...]
    other_keys: tuple[Span, ...]

    def keys(self, step: int) -> tuple[Span, ...]:
        """Return the positions of its own keys (step 0) or of all others' (step 1)."""
        return (self.own_keys, self.other_keys)[step]


@functools.lru_cache(maxsize=256)
def gathered_work(
    mask: Mask,
    partition: SequencePartition,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    placed: bool = False,
) -> GatheredWork:
    """Return what one rank computes.

    A block covers all visible keys, whichever ranks hold them; so there are no more blocks than on
    a single rank.

    Args: as ``ring_steps``.
    """
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    partition = partition_of(partition, mask.document_ends)
    queries, own_keys = (
        partition.chunks(num_queries, rank, size),
        partition.chunks(num_keys, rank, size),
    )
    located = [
        (span, Source(r, offset, offset + span[1] - span[0]))
        for r in range(size)
        if r != rank
        for span, offset in _with_offsets(partition.chunks(num_keys, r, size))
    ]
    located.sort(key=lambda entry: entry[0])
    other_keys = tuple(span for span, _ in located)
    sources = [source for _, source in located]
    own = blocks(mask, queries, own_keys, placed)
    others = (_narrowed(block) for block in blocks(mask, queries, other_keys, placed))
    return GatheredWork(
        rank=rank,
        own=tuple(GatheredBlock(block, (Source(rank, *block.keys),)) for block in own),
        others=tuple(GatheredBlock(block, _between(sources, *block.keys)) for block in others),
        queries=tuple(queries),
        own_keys=tuple(own_keys),
        other_keys=other_keys,
    )


def _with_offsets(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Pair each span with its offset in what its rank holds."""
    found: list[tuple[Span, int]] = []
    offset = 0
    for span in spans:
        found.append((span, offset))
        offset += span[1] - span[0]
    return found


def _narrowed(block: Block) -> Block:
    """Drop the keys at both ends that no query sees; they need not be concatenated."""
    mask = block.mask
    first, held = mask.query_start, mask.key_start
    queries = first, first + block.queries[1] - block.queries[0]
    start, end = seen_keys(mask, queries, (held, held + block.keys[1] - block.keys[0]))
    begin = block.keys[0] + start - held
    return Block(block.queries, (begin, begin + end - start), attrs.evolve(mask, key_start=start))


def _between(sources: list[Source], begin: int, end: int) -> tuple[Source, ...]:
    """Return the sources at offsets ``begin`` to ``end`` of their concatenation."""
    found: list[Source] = []
    offset = 0
    for source in sources:
        length = source.end - source.start
        first, last = max(begin - offset, 0), min(end - offset, length)
        if first < last:
            found.append(Source(source.rank, source.start + first, source.start + last))
        offset += length
    return tuple(found)
