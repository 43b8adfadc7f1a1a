"""The log of a run: structlog events to ``log.jsonl`` and, on rank 0, to the console.

An event is a noun with fields, ``log.info("plugin.enabled", plugin="ulysses", order=1)``. Every
rank appends to the one file: rank 0 what the level lets through, the others warnings and worse.
Python warnings and records of the standard logging module (Megatron's, torch's) go the same way.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ascend_run.plugin_api.errors import StorageError

from .append import AppendedLines
from .json_values import to_json

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger

LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging(path: Path | None, rank: int = 0, level: str = "info") -> RunLog:
    """Direct this process's log to a run.

    Args:
        path: ``log.jsonl`` of the run folder; None logs to the console only.
        rank: Bound to every event.
        level: Least severe level of rank 0; one of ``debug info warning error``.

    Returns:
        The log in force: ``.logger`` to log with, ``.close()`` (or the end of a ``with`` block) to
        put back what was configured before.

    Raises:
        StorageError: The file cannot be opened.
    """
    return RunLog(path, rank, level)


class RunLog:
    """A process's logging while it belongs to a run; see ``configure_logging``."""

    logger: FilteringBoundLogger

    def __init__(self, path: Path | None, rank: int, level: str) -> None:
        import structlog  # 0.1 s, so only a run pays it

        threshold = LEVELS[level] if rank == 0 else max(LEVELS[level], logging.WARNING)
        self._file = AppendedLines(path) if path is not None else None
        self._console = _console_renderer() if rank == 0 else None
        self._before: dict[str, Any] | None = structlog.get_config()
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                lambda logger, method, event: ((event,), {}),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(threshold),
            logger_factory=lambda *names: _Sink(self, rank),
            cache_logger_on_first_use=False,
        )
        self.logger = structlog.get_logger()
        self._refused = False
        self._forwarder = _Forwarder(self)
        logging.getLogger().addHandler(self._forwarder)
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._on_warning

    def write(self, event: EventDict) -> None:
        """Put one event, complete with rank and level, wherever this process logs to."""
        moment = time.time()
        if self._file is not None:
            self._file.append(to_json({"time": round(moment, 3), **event}))
        if self._console is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(moment))
            shown = {key: value for key, value in event.items() if key != "rank"}
            # Looked up now: a progress bar puts itself in place of sys.stderr.
            print(self._console(None, "", {"timestamp": clock, **shown}), file=sys.stderr)

    def write_of_others(self, level: str, event: str, **fields: Any) -> None:
        """As ``write``, for what libraries say; a log that refuses is told once and ends nothing.

        They log and warn in the middle of anything, where nobody expects an error of storage. The
        run's own next event raises it.
        """
        try:
            getattr(self.logger, level)(event, **fields)
        except StorageError as error:
            if not self._refused:
                print(error, file=sys.stderr, flush=True)
            self._refused = True

    def close(self) -> None:
        """Put back the logging that was there before; a second time does nothing."""
        import structlog

        if self._before is None:
            return
        warnings.showwarning = self._show_warning
        logging.getLogger().removeHandler(self._forwarder)
        structlog.configure(**self._before)
        self._before = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _on_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        kind = category.__name__
        self.write_of_others(
            "warning",
            "python.warning",
            message=str(message),
            kind=kind,
            source=f"{filename}:{lineno}",
        )


class _Sink:
    """What structlog takes for the logger under its own: every level ends in one place."""

    def __init__(self, log: RunLog, rank: int) -> None:
        self._log = log
        self._rank = rank

    def msg(self, event: EventDict) -> None:
        self._log.write({"level": event.pop("level"), "rank": self._rank, **event})

    debug = info = warning = error = critical = msg


class _Forwarder(logging.Handler):
    """Takes what others say through the standard logging module."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(level=logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = "error" if record.levelno >= logging.ERROR else "warning"
            message = record.getMessage()
            self._log.write_of_others(level, "python.log", message=message, source=record.name)
        except Exception:  # a foreign record that cannot be formatted must not end the run
            self.handleError(record)


def _console_renderer() -> Any:
    from structlog.dev import ConsoleRenderer, plain_traceback

    return ConsoleRenderer(
        colors=sys.stderr.isatty(), sort_keys=False, exception_formatter=plain_traceback
    )
