"""Which parts of the score matrix a rank computes where it has everybody's keys. No torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from .blocks import Block, Mask, blocks
from .cut import Cut, Span
from .seen_keys import seen_keys


@attrs.frozen
class Source:
    """A run of keys in what one rank holds."""

    rank: int
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.end)


@attrs.frozen
class GatheredBlock:
    """A block, and where its keys lie, one after the other."""

    block: Block
    """Its keys are places among its own keys, or among the others' in the order of their
    positions."""
    sources: tuple[Source, ...]


@attrs.frozen
class Work:
    """What one rank computes."""

    own: tuple[GatheredBlock, ...]
    """With its own keys, for which it waits for nobody."""
    others: tuple[GatheredBlock, ...]
    queries: tuple[Span, ...]
    """Positions of its queries; so for the next."""
    own_keys: tuple[Span, ...]
    other_keys: tuple[Span, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.own) + len(self.others)


@functools.lru_cache(maxsize=256)
def gathered_work(
    mask: Mask,
    cut: Cut,
    num_queries: int,
    num_keys: int,
    rank: int,
    size: int,
    placed: bool = False,
) -> Work:
    """Args: as ``ring_steps`` takes them.

    A block's keys are those that its mask lets it see, of however many ranks; so there are as few
    blocks as there would be on one rank.
    """
    mask = attrs.evolve(mask, query_start=0, key_start=0)
    if mask.document_ends:
        cut = cut.of_documents(mask.document_ends)
    queries, own_keys = cut.chunks(num_queries, rank, size), cut.chunks(num_keys, rank, size)
    places = [
        (span, Source(r, place, place + span[1] - span[0]))
        for r in range(size)
        if r != rank
        for span, place in _placed(cut.chunks(num_keys, r, size))
    ]
    places.sort(key=lambda place: place[0])
    other_keys = tuple(span for span, _ in places)
    sources = [source for _, source in places]
    own = blocks(mask, queries, own_keys, placed)
    others = (_narrowed(block) for block in blocks(mask, queries, other_keys, placed))
    return Work(
        own=tuple(GatheredBlock(block, (Source(rank, *block.keys),)) for block in own),
        others=tuple(GatheredBlock(block, _between(sources, *block.keys)) for block in others),
        queries=tuple(queries),
        own_keys=tuple(own_keys),
        other_keys=other_keys,
    )


def _placed(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each with where it begins in what its rank holds."""
    found: list[tuple[Span, int]] = []
    place = 0
    for span in spans:
        found.append((span, place))
        place += span[1] - span[0]
    return found


def _narrowed(block: Block) -> Block:
    """Without the keys at both ends that no query sees, which need not be brought together."""
    mask = block.mask
    first, held = mask.query_start, mask.key_start
    queries = first, first + block.queries[1] - block.queries[0]
    start, end = seen_keys(mask, queries, (held, held + block.keys[1] - block.keys[0]))
    begin = block.keys[0] + start - held
    return Block(block.queries, (begin, begin + end - start), attrs.evolve(mask, key_start=start))


def _between(sources: list[Source], begin: int, end: int) -> tuple[Source, ...]:
    """What lies at these places, where the sources lie one after the other."""
    found: list[Source] = []
    place = 0
    for source in sources:
        length = source.end - source.start
        first, last = max(begin - place, 0), min(end - place, length)
        if first < last:
            found.append(Source(source.rank, source.start + first, source.start + last))
        place += length
    return tuple(found)
