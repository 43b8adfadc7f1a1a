"""Conversations of the same roles as one text with gaps for their contents. No torch.

For templates that copy contents (``content_flow``): a conversation with markers for contents is
rendered once, and each further one takes no rendering.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import attrs

from .samples import Conversation

Span: TypeAlias = tuple[int, int]
"""Half-open range of characters."""
Place: TypeAlias = tuple[int, int]
"""A piece, and characters after its beginning."""
Shape: TypeAlias = tuple[str, ...]
"""The roles of a conversation."""

_SIDE: Final = "\u2003"
"""White space that shows whether a content is trimmed."""
_MARK: Final = "\U0010fff3"
_MOST_SHAPES: Final = 4096
_MARKER: Final = re.compile(f"({_SIDE}?){_MARK}([0-9]+){_MARK}({_SIDE}?)")


def shape_of(conversation: Conversation) -> Shape | None:
    """Return the roles; None if messages have more than a role and a content that is not blank, or
    there are tools or documents."""
    if conversation.tools or conversation.documents:
        return None
    for message in conversation.messages:
        content = message["content"]
        if len(message) != 2 or not content or content.isspace():
            return None
    return tuple(message["role"] for message in conversation.messages)


def marked_contents(shape: Shape) -> Conversation:
    """Return a conversation of these roles whose contents are found again in its text."""
    return Conversation(
        messages=tuple(
            {"role": role, "content": f"{_SIDE}{_MARK}{index}{_MARK}{_SIDE}"}
            for index, role in enumerate(shape)
        )
    )


@attrs.frozen
class Gap:
    """Where a content is copied to."""

    piece: int
    message: int
    left: bool
    """Whether its white space is trimmed on the left; likewise ``right``."""
    right: bool


@attrs.frozen
class Skeleton:
    """The text of conversations of one shape."""

    pieces: tuple[str, ...]
    """Fixed texts, and an empty one for each gap."""
    gaps: tuple[Gap, ...]
    spans: tuple[tuple[Place, Place], ...]
    """Turns of the assistant."""

    def filled(self, contents: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
        """Return the text of a conversation, and the turns of the assistant in it."""
        pieces = [*self.pieces]
        for gap in self.gaps:
            content = contents[gap.message]
            if gap.left:
                content = content.lstrip()
            pieces[gap.piece] = content.rstrip() if gap.right else content
        begins = [*accumulate(map(len, pieces), initial=0)]
        spans = tuple(
            (begins[first] + after, begins[last] + behind)
            for (first, after), (last, behind) in self.spans
        )
        return "".join(pieces), spans


@attrs.define
class Skeletons:
    """The skeletons of a template, each made for the second conversation of its shape."""

    _seen: set[Shape] = attrs.field(factory=set, init=False)
    _made: dict[Shape, Skeleton | None] = attrs.field(factory=dict, init=False)

    def of(self, shape: Shape, make: Callable[[Shape], Skeleton | None]) -> Skeleton | None:
        """Return the skeleton of a shape, or None if there is none, or none yet."""
        if shape in self._made:
            return self._made[shape]
        if shape in self._seen:
            found = self._made[shape] = make(shape)
            return found
        if len(self._seen) < _MOST_SHAPES:
            self._seen.add(shape)
        return None


def skeleton_of(text: str, spans: Sequence[Span]) -> Skeleton | None:
    """Return the skeleton of a text with markers; None if a turn begins or ends within one."""
    pieces: list[str] = []
    gaps: list[Gap] = []
    begins: list[int] = []
    at = 0
    for found in _MARKER.finditer(text):
        pieces += [text[at : found.start()], ""]
        begins += [at, found.start()]
        left, number, right = found.groups()
        gaps.append(Gap(len(pieces) - 1, int(number), not left, not right))
        at = found.end()
    pieces.append(text[at:])
    begins.append(at)

    def place(position: int) -> Place:
        piece = bisect_right(begins, position) - 1
        return piece, position - begins[piece]

    places = tuple((place(begin), place(end)) for begin, end in spans)
    of_gaps = {gap.piece for gap in gaps}
    if any(piece in of_gaps and after for span in places for piece, after in span):
        return None
    return Skeleton(tuple(pieces), tuple(gaps), places)
