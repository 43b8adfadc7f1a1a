"""Plain text that a run reads itself. No torch, no numpy: read when a run is planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import attrs

from ascend_run.plugin_api import DataError

from .document_files import PREPROCESS_OPTIONS, InputFile, OptionNames, Reader, find_files

_CHECKED_DOCUMENTS: Final = 100
"""A wrong key or format is in all rows, so these show it."""


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
        """Read the first documents, and return what is wrong, one sentence each.

        Rows after them are checked where all of them are read: ``encoded_documents``.
        """
        reader = self.reader()
        try:
            for _ in islice(reader.read(self.files()), _CHECKED_DOCUMENTS):
                pass
        except DataError as error:
            return error.problems
        return reader.problems
