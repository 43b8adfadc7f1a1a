"""Plain text that a run reads itself. No torch, no numpy: read when a run is planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from ascend_run.plugin_api import DataError

from .document_files import PREPROCESS_OPTIONS, InputFile, OptionNames, Reader, find_files


@attrs.frozen(kw_only=True)
class TextSource:
    """A file or folder of plain text, and how to read it; the options are those of
    ``preprocess``."""

    path: str
    format: str = "auto"
    key: str = "text"
    """Key of the text in a record."""
    append_eod: bool = True
    options: OptionNames = PREPROCESS_OPTIONS

    def files(self) -> Sequence[InputFile]:
        """Return its files.

        Raises:
            DataError: There are none, or one has an unknown suffix.
        """
        return find_files([Path(self.path)], self.format, self.options)

    def reader(self) -> Reader:
        """Return a reader of its documents."""
        return Reader(self.key, options=self.options)

    def problems(self) -> Sequence[str]:
        """Read everything, and return what is wrong, one sentence each."""
        try:
            for _ in self.reader().read(self.files()):
                pass
        except DataError as error:
            return error.problems
        return ()
