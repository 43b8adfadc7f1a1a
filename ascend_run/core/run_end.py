"""The end of a run: listeners are notified, a failure is recorded and raised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import AscendRunError

from .hook_errors import error_line, hook_call_of
from .hooks import Hooks
from .log.metrics import add_failure
from .rank.failures import record_failure

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


@contextmanager
def recording_failure(metrics: Path | None, log: FilteringBoundLogger) -> Iterator[None]:
    """Record the exception that ends the body, for the report and, if a plugin raised it, the log.

    Args:
        metrics: The metrics file; None on ranks that do not write it.
    """
    try:
        yield
    except BaseException as error:
        # The run's own error matters more than errors of writing.
        with suppress(Exception):
            _log(log, error)
        if metrics is not None:
            with suppress(Exception):
                add_failure(metrics, error_line(error))
        raise


@contextmanager
def notifying_listeners(
    hooks: Hooks, context: c.RunContext, log: FilteringBoundLogger
) -> Iterator[None]:
    """Call ``ascend_after_run`` when the body ends, by success or error.

    The first error of listeners is raised if the run succeeded otherwise. Others are logged, or
    printed if logging fails.
    """
    try:
        yield
    except BaseException as error:
        record_failure(error, rank=context.layout.rank)
        _report(hooks.notify_all("ascend_after_run", context=context), log)
        raise
    if failed := hooks.notify_all("ascend_after_run", context=context):
        _report(failed[1:], log)
        raise failed[0]


def _report(failed: list[Exception], log: FilteringBoundLogger) -> None:
    for error in failed:
        try:
            _log(log, error)
        except Exception:  # the disk may be full, which may be why the run ended
            print(error_line(error), file=sys.stderr, flush=True)


def _log(log: FilteringBoundLogger, error: BaseException) -> None:
    """Log an exception that left a hook, unless it says all that a user needs."""
    if not isinstance(error, AscendRunError) and (call := hook_call_of(error)):
        message = f"{type(error).__name__}: {error}"
        log.error("hook.failed", **attrs.asdict(call), error=message)
