"""The schedule of sends: which keys go from which rank to which, in which round. No torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import attrs

from ascend_run.ops.attention.visibility import seen_keys
from ascend_run.types.attention import Mask, SequencePartition

from .partitions import Span


@attrs.frozen(order=True)
class Transfer:
    """A send of keys and values."""

    source: int
    target: int
    spans: tuple[Span, ...]
    """Positions, in the order in which the source holds them."""

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.spans)


Rounds = tuple[tuple[Transfer, ...], ...]
"""In each round a rank sends at most once and receives at most once."""


@functools.lru_cache(maxsize=64)
def exchange_rounds(
    mask: Mask, partition: SequencePartition, num_queries: int, num_keys: int, size: int
) -> Rounds:
    """Schedule every transfer under a mask of the full sequence.

    Args:
        partition: For the mask's documents.
        num_queries, num_keys: Of the full sequence.
    """
    return in_rounds(key_transfers(mask, partition, num_queries, num_keys, size))


def key_transfers(
    mask: Mask, partition: SequencePartition, num_queries: int, num_keys: int, size: int
) -> tuple[Transfer, ...]:
    """Return the keys that queries of another rank see: at most one transfer per pair of ranks."""
    held = [partition.chunks(num_keys, rank, size) for rank in range(size)]
    found = []
    for target in range(size):
        queries = partition.chunks(num_queries, target, size)
        seen = _joined(seen_keys(mask, span, (0, num_keys)) for span in queries)
        for source in range(size):
            spans = tuple(_both(held[source], seen))
            if source != target and spans:
                found.append(Transfer(source, target, spans))
    return tuple(found)


def in_rounds(transfers: Iterable[Transfer]) -> Rounds:
    """Schedule transfers in the fewest rounds: as many as the busiest rank sends or receives.

    This is an edge colouring of the bipartite graph of senders and receivers; a round is a colour.
    If no colour is free at both ends, two colours swap along the path from one of them (Koenig's
    theorem). The longest transfers are coloured first, so that those of a round have similar
    lengths. Rounds are sorted shortest first: in backward the gradients of the first round are the
    last to be sent, and are exposed.
    """
    at: dict[tuple[str, int], dict[int, Transfer]] = {}
    for transfer in sorted(transfers, key=lambda m: (-m.num_keys, m)):
        ends = _ends(transfer)
        here, there = (_free(at.setdefault(end, {})) for end in ends)
        path = _path(at, ends[1], here, there)
        for moved, colour, _ in path:
            for end in _ends(moved):
                del at[end][colour]
        for moved, _, colour in path:
            for end in _ends(moved):
                at[end][colour] = moved
        for end in ends:
            at[end][here] = transfer
    rounds: dict[int, list[Transfer]] = {}
    for (side, _), of_colour in at.items():
        for colour, transfer in of_colour.items():
            if side == "from":
                rounds.setdefault(colour, []).append(transfer)
    longest = [(max(m.num_keys for m in found), sorted(found)) for found in rounds.values()]
    return tuple(tuple(found) for _, found in sorted(longest))


def _path(
    at: dict[tuple[str, int], dict[int, Transfer]], end: tuple[str, int], taken: int, free: int
) -> list[tuple[Transfer, int, int]]:
    """Return what must change colour so that ``taken`` is free here: (transfer, from, to)."""
    found = []
    while (transfer := at[end].get(taken)) is not None:
        found.append((transfer, taken, free))
        (end,) = (other for other in _ends(transfer) if other != end)
        taken, free = free, taken
    return found


def _ends(transfer: Transfer) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("from", transfer.source), ("to", transfer.target)


def _free(of_colour: dict[int, Transfer]) -> int:
    return next(colour for colour in itertools.count() if colour not in of_colour)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the sorted union of the spans."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _both(held: Sequence[Span], seen: Sequence[Span]) -> Iterable[Span]:
    for first, last in held:
        for start, end in seen:
            if max(first, start) < min(last, end):
                yield max(first, start), min(last, end)
