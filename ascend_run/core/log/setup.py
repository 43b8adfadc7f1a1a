"""The log of a run: structlog events to ``log.jsonl`` and, on rank 0, to the console.

An event is a noun with fields, ``log.info("plugin.enabled", plugin="ulysses", order=1)``. All ranks
append to the same file: rank 0 at the configured level, the others from warnings up. Python
warnings and records of the standard logging module (Megatron's, torch's) are included.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
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
    """Configure this process's logging for a run.

    Args:
        path: ``log.jsonl`` in the run folder; None logs to the console only.
        rank: Bound to every event.
        level: Lowest level of rank 0; one of ``debug info warning error``.

    Returns:
        The active log: use ``.logger`` to log; ``.close()`` or the end of a ``with`` block restores
            the previous configuration.

    Raises:
        StorageError: The file cannot be opened.
    """
    return RunLog(path, rank, level)


class RunLog:
    """A process's logging during a run; see ``configure_logging``."""

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
        """Write one event, with rank and level, to the file and the console."""
        moment = time.time()
        if self._file is not None:
            self._file.append(to_json({"time": round(moment, 3), **event}))
        if self._console is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(moment))
            shown = {key: value for key, value in event.items() if key != "rank"}
            # Looked up at each call: a progress bar replaces sys.stderr.
            print(self._console(None, "", {"timestamp": clock, **shown}), file=sys.stderr)

    def write_library_event(self, level: str, event: str, **fields: Any) -> None:
        """Log what libraries report; a StorageError is printed once and not raised.

        Libraries log and warn at any point, where no caller expects a StorageError. The run's own
        next event raises it.
        """
        try:
            getattr(self.logger, level)(event, **fields)
        except StorageError as error:
            if not self._refused:
                print(error, file=sys.stderr, flush=True)
            self._refused = True

    def close(self) -> None:
        """Restore the previous logging configuration. Calling it twice is allowed."""
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

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _on_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        kind = category.__name__
        self.write_library_event(
            "warning",
            "python.warning",
            message=str(message),
            kind=kind,
            source=f"{filename}:{lineno}",
        )


class _Sink:
    """The logger that structlog wraps: every level calls one method."""

    def __init__(self, log: RunLog, rank: int) -> None:
        self._log = log
        self._rank = rank

    def msg(self, event: EventDict) -> None:
        self._log.write({"level": event.pop("level"), "rank": self._rank, **event})

    debug = info = warning = error = critical = msg


class _Forwarder(logging.Handler):
    """Forward records of the standard logging module."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(level=logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = "error" if record.levelno >= logging.ERROR else "warning"
            message = record.getMessage()
            self._log.write_library_event(level, "python.log", message=message, source=record.name)
        except Exception:  # a malformed third-party record must not end the run
            self.handleError(record)


def _console_renderer() -> Any:
    from structlog.dev import ConsoleRenderer, plain_traceback

    return ConsoleRenderer(
        colors=sys.stderr.isatty(), sort_keys=False, exception_formatter=plain_traceback
    )
