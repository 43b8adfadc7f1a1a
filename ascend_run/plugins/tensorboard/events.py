"""Readings as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ascend_run.plugin_api import StorageError

_FILE_MODE = 0o640
_FOLDER_MODE = 0o750


class EventFiles:
    """One attempt's event file in a folder that may hold those of earlier attempts.

    Args:
        folder: Created where it is missing.
        first_step: Step of the first reading; TensorBoard discards what an earlier attempt wrote
            of this step and later ones.
        flush_seconds: How long a reading may wait in memory.

    Raises:
        StorageError: The folder cannot be written.
    """

    def __init__(self, folder: Path, first_step: int, *, flush_seconds: int) -> None:
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            self._writer = SummaryWriter(
                str(folder), purge_step=first_step, flush_secs=flush_seconds
            )
            for path in folder.glob("events.out.tfevents.*"):
                path.chmod(_FILE_MODE)
        except OSError as error:
            raise StorageError(
                f"tensorboard: cannot write to {folder}",
                [f"{error.strerror or error}; choose another plugins.tensorboard.folder"],
            ) from error

    def write(self, step: int, readings: Mapping[str, Any]) -> None:
        """Write each number under its name, the items of a list under ``name/0``, ``name/1`` ...

        A reading's own ``step`` counts where it has one. Values are kept as float32, which is what
        TensorBoard's scalars are.
        """
        step = int(readings.get("step", step))
        for tag, value in _scalars(readings):
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what waits and close the file."""
        self._writer.close()


def _scalars(readings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in readings.items():
        if name == "step":
            continue
        if isinstance(value, list | tuple):
            yield from ((f"{name}/{i}", float(item)) for i, item in enumerate(value))
        elif value is not None and not isinstance(value, str):
            yield name, float(value)
