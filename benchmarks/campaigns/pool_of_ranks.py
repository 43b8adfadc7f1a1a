"""Gloo ranks that live as long as the process of a campaign."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any, Final

from ascend_run.testing.pool import GlooPool

_PATIENCE: Final = 10.0


class PatientPool(GlooPool):
    """A pool whose jobs have ten times the usual limit: a campaign runs beside other work."""

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        return super().run(function, world_size, *args, timeout=_PATIENCE * timeout, **kwargs)


@functools.cache
def pool() -> GlooPool:
    """Started when first asked for; its ranks end with this process."""
    opened = PatientPool()
    opened.__enter__()
    atexit.register(opened.__exit__, None, None, None)
    return opened
