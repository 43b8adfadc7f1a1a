"""Results of an interrupted search, one JSON line each. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from ascend_run.core.files import storage_error

from .choices import Compared, State


class Journal:
    """A file with the comparisons made so far; each is on the disk before the next one begins.

    Args:
        folder: Where it lies.
        identity: What the results depend on, as JSON values; its hash is in the file's name.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        text = json.dumps(identity, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.path = folder / f"bisect-{key}.jsonl"

    def read(self) -> Iterator[Compared]:
        """Yield the comparisons made so far, except one whose line is incomplete."""
        try:
            lines = self.path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(self.path, error) from None
        for line in lines:
            try:
                data = json.loads(line)
            except ValueError:  # the search was killed while it wrote this line
                continue
            state = State(data.pop("state"))
            yield Compared(**{**data, "changes": tuple(data["changes"]), "state": state})

    def append(self, compared: Compared) -> None:
        """
        Raises:
            StorageError: The file cannot be written.
        """
        # The newline comes first, in case that the last line is incomplete.
        line = f"\n{json.dumps(attrs.asdict(compared))}\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from None

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self.path.unlink(missing_ok=True)
