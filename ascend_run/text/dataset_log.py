"""The line of ``log.jsonl`` about what a task reads; a report finds it by its event. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

DATASET_READ: Final = "data.read"


def log_dataset(files: Sequence[str], *, samples: int, tokens: int, **more: object) -> None:
    """Log the size of an epoch of files that a task reads.

    Args:
        files: As ``[data]`` names them.
        more: What else the task knows of them.
    """
    import structlog  # late: readers of logs need the event's name alone

    structlog.get_logger().info(
        DATASET_READ, files=[*files], samples=samples, tokens=tokens, **more
    )
