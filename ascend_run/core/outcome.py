"""How a run ends: every listener is told, and the error that ended it is the one that is raised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ascend_run.plugin_api import contracts as c

from .hooks import Hooks
from .launch.failures import record_failure


@contextmanager
def told_to_listeners(hooks: Hooks, context: c.RunContext, log: Any) -> Iterator[None]:
    """Tell of the end of what is inside: ``ascend_after_failure`` if it failed, and always
    ``ascend_after_run``.

    What a listener raises is logged. It is raised only after a run that has succeeded otherwise.
    """
    try:
        yield
    except BaseException as error:
        record_failure(error, rank=context.layout.rank)
        _tell(hooks, log, "ascend_after_failure", context=context, error=error)
        _tell(hooks, log, "ascend_after_run", context=context)
        raise
    if failed := _tell(hooks, log, "ascend_after_run", context=context):
        raise failed[0]


def _tell(hooks: Hooks, log: Any, event: str, **arguments: Any) -> list[Exception]:
    """What listeners raised, each told of in the log, or where that is what fails, at once."""
    failed = hooks.tell_all(event, **arguments)
    for plugin, error in failed:
        message = f"{type(error).__name__}: {error}"
        try:
            log.error("listener.failed", plugin=plugin, hook=event, error=message)
        except Exception:  # the disk may be full, which may be why the run ends
            print(f"{plugin}, {event}: {message}", file=sys.stderr, flush=True)
    return [error for _, error in failed]
