"""Gloo ranks that live as long as the process of a campaign."""

from __future__ import annotations

import atexit
import functools
from typing import Final

from ascend_run.testing.pool import GlooPool

_LIMIT_FACTOR: Final = 10.0
"""A campaign runs beside other work."""


@functools.cache
def pool() -> GlooPool:
    """Started when first asked for; its ranks end with this process."""
    opened = GlooPool(limit_factor=_LIMIT_FACTOR)
    opened.__enter__()
    atexit.register(opened.__exit__, None, None, None)
    return opened
