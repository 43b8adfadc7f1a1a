"""Gloo ranks that live as long as the process of a campaign."""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_run.testing.pool import GlooPool


@functools.cache
def pool() -> GlooPool:
    """Started when first asked for; its ranks end with this process."""
    from ascend_run.testing.pool import GlooPool

    opened = GlooPool()
    opened.__enter__()
    atexit.register(opened.__exit__, None, None, None)
    return opened
