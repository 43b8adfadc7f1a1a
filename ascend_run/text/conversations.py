"""How conversations become documents of a task's samples. No torch."""

from __future__ import annotations

from .encoding import LengthLimit, encoded_dataset, encoded_files
from .samples import Conversation
from .task_samples import SampleEncoding


def conversation_encoding(max_positions: int, too_long: str) -> SampleEncoding[LengthLimit]:
    """Return how conversations become documents.

    Args:
        max_positions: Of a conversation; one of n tokens takes n - 1, since its last one is only a
            label.
        too_long: See ``LengthLimit``.
    """
    return SampleEncoding(
        kind=Conversation,
        name="conversations",
        group=1,
        limit=LengthLimit(max_tokens=max_positions + 1, too_long=too_long),
        of_files=encoded_files,
        of_dataset=encoded_dataset,
    )
