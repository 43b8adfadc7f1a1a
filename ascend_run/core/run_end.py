"""Notify listeners of the end of a run, and raise the error that ended it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ascend_run.plugin_api import contracts as c

from .hooks import Hooks
from .rank.failures import record_failure

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


@contextmanager
def notifying_listeners(
    hooks: Hooks, context: c.RunContext, log: FilteringBoundLogger
) -> Iterator[None]:
    """Call ``ascend_after_run`` when the body ends, by success or error.

    Errors of listeners are logged. The first one is raised if the run succeeded otherwise.
    """
    try:
        yield
    except BaseException as error:
        record_failure(error, rank=context.layout.rank)
        _notify(hooks, log, context)
        raise
    if failed := _notify(hooks, log, context):
        raise failed[0]


def _notify(hooks: Hooks, log: FilteringBoundLogger, context: c.RunContext) -> list[Exception]:
    """Call the listeners, log their errors (or print them if logging fails) and return them."""
    event = "ascend_after_run"
    failed = hooks.notify_all(event, context=context)
    for plugin, error in failed:
        message = f"{type(error).__name__}: {error}"
        try:
            log.error("listener.failed", plugin=plugin, hook=event, error=message)
        except Exception:  # the disk may be full, which may be why the run ended
            print(f"{plugin}, {event}: {message}", file=sys.stderr, flush=True)
    return [error for _, error in failed]
