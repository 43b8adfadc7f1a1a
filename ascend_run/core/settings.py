"""Process-wide settings that plugins apply during a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ascend_run.types.config import RunConfig

from .hooks import Hooks


@contextmanager
def process_settings(config: RunConfig, hooks: Hooks) -> Iterator[None]:
    """Enter the plugins' settings in resolved order; exit them in reverse order.

    The interpreter's recursion limit is restored last: torch.compile raises it when it compiles and
    does not restore it.
    """
    hook = "ascend_process_settings"
    settings = hooks.merge_named(hook, config=config)
    with ExitStack() as stack:
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        for plugin, setting in settings.values():
            with hooks.naming(hook, plugin):
                stack.enter_context(setting)
        yield
