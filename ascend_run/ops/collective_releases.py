"""When the tensors of completed collectives are freed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_POLLS: Final = 3
_POLL_SECONDS: Final = 0.02
"""gloo's threads release the tensors of a collective a moment after it has completed, later on a
busy machine: those that are left have not changed in this many polls."""


def count_after_releases(count: Callable[[], int]) -> int:
    """Wait until gloo's threads hold no tensor of a completed collective.

    Args:
        count: Returns the number or the bytes of the tensors that are alive.

    Returns:
        The last count.
    """
    left, unchanged = count(), 0
    while unchanged < _POLLS:
        time.sleep(_POLL_SECONDS)
        before, left = left, count()
        unchanged = unchanged + 1 if left == before else 0
    return left
