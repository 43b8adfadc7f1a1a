"""Write metrics as TensorBoard scalars.

The file is written here with TensorBoard's record format, and not with TensorBoard's writer, whose
background thread turns a full disk into a traceback instead of an error of the run.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ascend_run.plugin_api import StorageError

_FILE_MODE = 0o640
_FOLDER_MODE = 0o750


class EventFiles:
    """Write the event file of one attempt; the folder may hold files of earlier attempts.

    Args:
        folder: Created if it is missing.
        first_step: Step of the first metric; TensorBoard discards what an earlier attempt wrote for
            this step and later ones.
        flush_seconds: How long a metric may stay buffered before it is written.

    Raises:
        StorageError: The file system raises an error; from any method.
    """

    def __init__(self, folder: Path, first_step: int, *, flush_seconds: int) -> None:
        self._folder = folder
        self._flush_seconds = flush_seconds
        self._flushed = 0.0
        now = time.time()
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        with self._storage_errors():
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(_unused(folder / name), flags, _FILE_MODE)
        self._add(Event(wall_time=now, step=first_step, file_version="brain.Event:2"))
        session = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=now, step=first_step, session_log=session))

    def write(self, step: int, readings: Mapping[str, Any]) -> None:
        """Write each number under its name, the items of a list under ``name/0``, ``name/1`` ...

        The metrics' own ``step`` takes precedence. Values are stored as float32, as TensorBoard's
        scalars are.
        """
        step = int(readings.get("step", step))
        for tag, value in _scalars(readings):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            self._add(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self._flush()

    def close(self) -> None:
        """Write the buffered events and close the file."""
        try:
            self._flush()
        finally:
            os.close(self._descriptor)

    def _flush(self) -> None:
        rest = memoryview(self._waiting.getvalue())
        # A failed write is not retried: it ends the run.
        self._waiting.seek(0)
        self._waiting.truncate()
        self._flushed = time.monotonic()
        with self._storage_errors():
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "make room, or choose another plugins.tensorboard.folder"
            raise StorageError(
                f"tensorboard: cannot write to {self._folder}",
                [f"{error.strerror or error}; {advice}"],
            ) from error


def _unused(path: Path) -> Path:
    """Return a path that does not exist yet; later numbers sort after earlier ones."""
    number = 0
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _scalars(readings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in readings.items():
        if name == "step":
            continue
        if isinstance(value, list | tuple):
            if any(isinstance(item, list | tuple) for item in value):
                continue  # of every layer and expert: too many tags
            yield from ((f"{name}/{i}", float(item)) for i, item in enumerate(value))
        elif value is not None and not isinstance(value, str):
            yield name, float(value)
