"""Files of text in three formats, read as documents, with every flaw named by file and line."""

from __future__ import annotations

import io
import json
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.plugin_api import DataError

SUFFIXES: Final = {
    "jsonl": (".jsonl",),
    "text": (".txt", ".md", ".rst"),
    "python": (".py",),
}
FORMATS: Final = tuple(SUFFIXES)
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages", "dist-packages"})
_MOST_PROBLEMS: Final = 20
"""So many flaws make a message; reading on would not help."""


@attrs.frozen
class InputFile:
    """One file and how to read it."""

    path: Path
    format: str
    size_bytes: int


@attrs.frozen
class Document:
    """One text."""

    text: str
    source: str
    """``file``, or ``file:line``."""
    read_bytes: int
    """What it took of its file, for the progress bar."""


def find_files(inputs: Sequence[Path], format: str = "auto") -> list[InputFile]:
    """The files that the user named and those in the folders that the user named, sorted.

    A file that is named is read whatever its suffix where a format is given. In folders the
    suffix decides; hidden ones, caches and installed packages are left out.

    Args:
        format: One of ``FORMATS``, or ``auto`` to go by the suffix.

    Raises:
        DataError: Missing, without a format, or nothing found; every problem at once.
    """
    wanted = SUFFIXES if format == "auto" else {format: SUFFIXES[format]}
    by_suffix = {suffix: name for name, suffixes in wanted.items() for suffix in suffixes}
    found: dict[Path, str] = {}
    problems = []
    for path in inputs:
        if path.is_dir():
            within = [p for p in sorted(path.rglob("*")) if _counts(p, path, by_suffix)]
            found.update((p, by_suffix[p.suffix]) for p in within)
            if not within:
                problems.append(f"{path}: no files ending in {', '.join(sorted(by_suffix))}")
        elif not path.exists():
            problems.append(f"{path}: no such file or folder")
        elif format == "auto" and path.suffix not in by_suffix:
            problems.append(
                f"{path}: unknown suffix {path.suffix!r}; say --format {'|'.join(FORMATS)}"
            )
        else:
            found[path] = by_suffix[path.suffix] if format == "auto" else format
    if problems:
        raise DataError("cannot read the input", problems)
    return [InputFile(path, name, path.stat().st_size) for path, name in found.items()]


def _counts(path: Path, root: Path, suffixes: dict[str, str]) -> bool:
    folders = path.relative_to(root).parts[:-1]
    hidden = any(part.startswith(".") for part in (*folders, path.name))
    return (
        path.suffix in suffixes
        and not hidden
        and not _SKIPPED_FOLDERS.intersection(folders)
        and path.is_file()
    )


@attrs.define
class Reader:
    """Reads documents and gathers what is wrong with them.

    Args:
        key: The field of a JSON line that holds the text.
        skip_undecodable: Leave out files that are not in their encoding, instead of refusing.
    """

    key: str = "text"
    skip_undecodable: bool = False
    undecodable: list[str] = attrs.field(factory=list, init=False)
    """Files left out."""
    problems: list[str] = attrs.field(factory=list, init=False)

    def read(self, files: Sequence[InputFile]) -> Iterator[Document]:
        """Every document, in order.

        Raises:
            DataError: At the end, or after many: bad JSON, a missing key, undecodable text.
        """
        self.undecodable.clear()
        self.problems.clear()
        readers: dict[str, Callable[[Path], Iterator[Document]]] = {
            "jsonl": self._json_lines,
            "text": self._text,
            "python": self._python,
        }
        for file in files:
            try:
                yield from readers[file.format](file.path)
            except OSError as error:
                self._problem(f"{file.path}: {error.strerror}")
        if self.problems:
            raise DataError("cannot read the input", self.problems)

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        if len(self.problems) >= _MOST_PROBLEMS:
            raise DataError("cannot read the input", [*self.problems, "... and perhaps more"])

    def _undecodable(self, path: Path, reason: str) -> None:
        if self.skip_undecodable:
            self.undecodable.append(str(path))
        else:
            self._problem(f"{path}: {reason}; convert it to UTF-8, or pass --skip-undecodable")

    def _text(self, path: Path) -> Iterator[Document]:
        content = path.read_bytes()
        try:
            yield Document(content.decode("utf-8-sig"), str(path), len(content))
        except UnicodeDecodeError as error:
            self._undecodable(path, f"not UTF-8 at byte {error.start}")

    def _python(self, path: Path) -> Iterator[Document]:
        """A module, in the encoding that it declares (PEP 263)."""
        content = path.read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
            text.encode("utf-8")
        except (SyntaxError, UnicodeError, LookupError) as error:
            self._undecodable(path, f"not in the encoding it declares ({error})")
            return
        yield Document(text, str(path), len(content))

    def _json_lines(self, path: Path) -> Iterator[Document]:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                source = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip() and (text := self._json_text(line, source)) is not None:
                    yield Document(text, source, len(line))

    def _json_text(self, line: bytes, source: str) -> str | None:
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._problem(f"{source}: not UTF-8 at byte {error.start} of the line")
            return None
        except (ValueError, RecursionError) as error:
            self._problem(f"{source}: not a JSON object on one line ({error})")
            return None
        if not isinstance(record, dict):
            self._problem(f"{source}: expected a JSON object, got {type(record).__name__}")
            return None
        text = record.get(self.key)
        if not isinstance(text, str):
            has = f"{type(text).__name__}" if self.key in record else "nothing"
            keys = ", ".join(map(repr, sorted(record))) or "none"
            self._problem(
                f"{source}: expected text under key {self.key!r}, got {has}; its keys: {keys}; "
                "choose with --json-key"
            )
            return None
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self._problem(f"{source}: half of a surrogate pair at character {error.start}")
            return None
        return text
