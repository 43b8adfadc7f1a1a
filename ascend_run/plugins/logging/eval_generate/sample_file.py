"""The file of the run folder with the texts; the report shows it as tables. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api import StorageError

FILE_NAME: Final = "samples.jsonl"
_opened: Final = partial(os.open, mode=0o640)


@attrs.frozen(kw_only=True)
class Text:
    """What the model wrote after a prompt."""

    title: str  #: The prompt.
    text: str
    ids: tuple[int, ...]  #: The new ids, with the one that ended the text.
    finish: str  #: ``stop``: by the end of a document; ``length``: it was long enough.


class SampleFile:
    """Lines that are kept until they are written."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, step: int, texts: Iterable[Text]) -> None:
        """Keep the texts of a step."""
        for text in texts:
            line = {
                "step": step,
                "title": text.title,
                "values": {"step": step, "text": text.text, "end": text.finish},
                "ids": text.ids,
            }
            self._lines.append(json.dumps(line, ensure_ascii=False) + "\n")

    def write(self, folder: Path) -> None:
        """Append what is kept to the file.

        Raises:
            StorageError: It cannot be written.
        """
        if not self._lines:
            return
        lines, self._lines = self._lines, []

        def append(path: Path) -> None:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=_opened) as file:
                file.writelines(lines)

        _changed(folder / FILE_NAME, append)

    def forget_after(self, step: int, folder: Path) -> None:
        """Take the lines of later steps out of the file: the run comes to these steps again.

        Raises:
            StorageError: It cannot be written.
        """

        def shorten(path: Path) -> None:
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = text.splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            if len(kept) < len(lines):
                shorter = path.with_suffix(".new")
                with open(shorter, "w", encoding="utf-8", opener=_opened) as file:
                    file.writelines(kept)
                shorter.replace(path)

        if (folder / FILE_NAME).exists():
            _changed(folder / FILE_NAME, shorten)


def _changed(path: Path, change: Callable[[Path], None]) -> None:
    try:
        change(path)
    except OSError as error:
        raise StorageError(
            f"eval-generate: cannot write {path}",
            [f"{error.strerror or error}; make room, or choose another run.output_dir"],
        ) from error


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for one that was cut off when the run was killed."""
    try:
        found: Any = json.loads(line)
        return int(found["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
