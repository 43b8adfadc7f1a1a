"""Which keys travel from whom to whom, and in which order. No torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ascend_run.ops.attention.ring_attention.cut import Cut, Span
from ascend_run.ops.attention.ring_attention.seen_keys import Rules, seen_keys

Mask = Any
"""plugin_api's Mask, which says what each field means."""


@attrs.frozen(order=True)
class Transfer:
    """A message of keys and values."""

    source: int
    target: int
    spans: tuple[Span, ...]
    """Positions, in the order in which the source holds them."""

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.spans)


Rounds = tuple[tuple[Transfer, ...], ...]
"""In each round a rank sends at most one message and receives at most one."""


@functools.lru_cache(maxsize=64)
def exchange_rounds(mask: Mask, cut: Cut, num_queries: int, num_keys: int, size: int) -> Rounds:
    """Everything that travels under a mask of the whole sequence.

    Args:
        cut: As the documents have it.
        num_queries, num_keys: Of the whole sequence.
    """
    return in_rounds(transfers(mask, cut, num_queries, num_keys, size))


def transfers(
    mask: Rules, cut: Cut, num_queries: int, num_keys: int, size: int
) -> tuple[Transfer, ...]:
    """The keys that some query of another rank sees; a message for two ranks, or none."""
    held = [cut.chunks(num_keys, rank, size) for rank in range(size)]
    found = []
    for target in range(size):
        queries = cut.chunks(num_queries, target, size)
        seen = _joined(seen_keys(mask, span, (0, num_keys)) for span in queries)
        for source in range(size):
            spans = tuple(_both(held[source], seen))
            if source != target and spans:
                found.append(Transfer(source, target, spans))
    return tuple(found)


def in_rounds(messages: Iterable[Transfer]) -> Rounds:
    """As few as there can be: as many as the busiest rank sends or receives messages.

    A round is a colour of the edges of a graph with two sides, senders and receivers. Where no
    colour is free at both ends, two colours change places along the path from one of them (Koenig's
    theorem). The longest messages are coloured first, so that those of a round are much alike, and
    the shortest come first: in backward their sums are the last to go home, beside nothing.
    """
    at: dict[tuple[str, int], dict[int, Transfer]] = {}
    for message in sorted(messages, key=lambda m: (-m.num_keys, m)):
        ends = _ends(message)
        here, there = (_free(at.setdefault(end, {})) for end in ends)
        path = _path(at, ends[1], here, there)
        for moved, colour, _ in path:
            for end in _ends(moved):
                del at[end][colour]
        for moved, _, colour in path:
            for end in _ends(moved):
                at[end][colour] = moved
        for end in ends:
            at[end][here] = message
    rounds: dict[int, list[Transfer]] = {}
    for (side, _), of_colour in at.items():
        for colour, message in of_colour.items():
            if side == "from":
                rounds.setdefault(colour, []).append(message)
    longest = [(max(m.num_keys for m in found), sorted(found)) for found in rounds.values()]
    return tuple(tuple(found) for _, found in sorted(longest))


def _path(
    at: dict[tuple[str, int], dict[int, Transfer]], end: tuple[str, int], taken: int, free: int
) -> list[tuple[Transfer, int, int]]:
    """What must change its colour so that ``taken`` is free here: message, from and to."""
    found = []
    while (message := at[end].get(taken)) is not None:
        found.append((message, taken, free))
        (end,) = (other for other in _ends(message) if other != end)
        taken, free = free, taken
    return found


def _ends(message: Transfer) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("from", message.source), ("to", message.target)


def _free(of_colour: dict[int, Transfer]) -> int:
    return next(colour for colour in itertools.count() if colour not in of_colour)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """What is in any of them, in order."""
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
