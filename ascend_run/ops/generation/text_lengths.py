"""How long a model's texts may be, and which lengths have the same rotary angles. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from ascend_run.types.config import RunConfig


@attrs.frozen
class TextLengths:
    """How the length of a text changes the angles of its tokens.

    A scaling that ignores the length has the longest text alone. ``longrope`` has other angles
    above a boundary. ``dynamic`` has angles of its own for each length above it.
    """

    longest: int  #: Longest text. Unit: tokens.
    boundary: int | None = None
    """Texts up to it have the same angles; None: all texts do."""
    grows: bool = False
    """Each length above the boundary has its own angles; otherwise all of them have the same."""

    @classmethod
    def of_model(cls, config: RunConfig) -> TextLengths:
        """Return the lengths of a model's texts.

        Those of a ``dynamic`` scaling may grow to the length that its factor is for:
        ``factor * max_position_embeddings``.
        """
        model = config.model
        longest: int = model.max_position_embeddings or config.data.seq_length
        if model.rope_scaling_type == "dynamic":
            return cls(int(longest * model.rope_scaling_factor), boundary=longest, grows=True)
        if model.rope_scaling_type == "longrope":
            trained = model.rope_scaling_original_max_position_embeddings
            return cls(longest, boundary=trained or longest)
        return cls(longest)

    def counted(self, length: int) -> int:
        """Return the length that stands for this one: their angles are the same."""
        if self.boundary is None:
            return self.longest
        if length <= self.boundary:
            return min(self.boundary, self.longest)
        return length if self.grows else self.longest

    @property
    def restarts_above(self) -> int | None:
        """Length above which the keys of a shorter text have angles that are no longer right.

        None if there is none, and if every token would begin the text again: then old keys stay.
        """
        return None if self.grows else self.boundary

    def have_same_keys(self, length: int, other: int) -> bool:
        """Return whether tokens that begin a text of one length, however it grew to it, have the
        keys that they have in a text of another length."""
        if self.boundary is None:
            return True
        if self.grows:
            return max(length, other) <= self.boundary
        return (length > self.boundary) == (other > self.boundary)
