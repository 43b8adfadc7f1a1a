"""Read documents from files in several formats; errors name file and line or row."""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api import DataError

from .sources import Problems, read_records

SUFFIXES: Final = {
    "jsonl": (".jsonl",),
    "records": (".json", ".json.gz", ".jsonl.gz", ".csv", ".parquet", ".arrow"),
    "text": (".txt", ".md", ".rst"),
    "python": (".py",),
}
FORMATS: Final = tuple(SUFFIXES)
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages", "dist-packages"})
_MOST_PROBLEMS: Final = 20
"""Reading stops after this number of errors."""


@attrs.frozen
class InputFile:
    """One file and how to read it."""

    path: Path
    format: str
    size_bytes: int

    def sha256(self) -> str:
        """Return the digest of its content.

        Raises:
            DataError: It cannot be read.
        """
        try:
            with self.path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}") from error


@attrs.frozen(kw_only=True)
class OptionNames:
    """What messages call the options of reading."""

    format: str = "--format "
    """With the separator of its value."""
    key: str = "--json-key"
    skip_undecodable: str | None = "--skip-undecodable"


PREPROCESS_OPTIONS: Final = OptionNames()


@attrs.frozen
class Document:
    """One document."""

    text: str
    source: str
    """``file``, or ``file:line``."""
    read_bytes: int
    """Bytes read from its file, for the progress bar."""


def find_files(
    inputs: Sequence[Path], format: str = "auto", options: OptionNames = PREPROCESS_OPTIONS
) -> list[InputFile]:
    """Return the given files and those in the given folders, sorted.

    With a format, given files may have any suffix. In folders, files are selected by suffix;
    hidden files, caches and installed packages are skipped, and so are tables and JSON arrays
    unless their format is given: a folder of text may hold records of other things.

    Args:
        format: One of ``FORMATS``, or ``auto`` for the format of the suffix.

    Raises:
        DataError: Inputs are missing, have an unknown suffix, or have no files; lists all problems.
    """
    wanted = SUFFIXES if format == "auto" else {format: SUFFIXES[format]}
    by_suffix = {suffix: name for name, suffixes in wanted.items() for suffix in suffixes}
    in_folders = {s: name for s, name in by_suffix.items() if format == name or name != "records"}
    found: dict[Path, str] = {}
    problems = []
    for path in inputs:
        if path.is_dir():
            within = [p for p in sorted(path.rglob("*")) if _counts(p, path, in_folders)]
            found.update((p, by_suffix[_suffix(p)]) for p in within)
            if not within:
                problems.append(f"{path}: no files ending in {', '.join(sorted(in_folders))}")
        elif not path.exists():
            problems.append(f"{path}: no such file or folder")
        elif format == "auto" and _suffix(path) not in by_suffix:
            problems.append(
                f"{path}: unknown suffix {path.suffix!r}; set {options.format}{'|'.join(FORMATS)}"
            )
        else:
            found[path] = by_suffix[_suffix(path)] if format == "auto" else format
    if problems:
        raise DataError("cannot read the input", problems)
    return [InputFile(path, name, path.stat().st_size) for path, name in found.items()]


def _suffix(path: Path) -> str:
    """Return the suffix, with the one before it if the file is compressed."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _counts(path: Path, root: Path, suffixes: dict[str, str]) -> bool:
    folders = path.relative_to(root).parts[:-1]
    hidden = any(part.startswith(".") for part in (*folders, path.name))
    return (
        _suffix(path) in suffixes
        and not hidden
        and not _SKIPPED_FOLDERS.intersection(folders)
        and path.is_file()
    )


@attrs.define
class Reader:
    """Reads documents and collects errors.

    Args:
        key: Key of the text in a JSON line.
        skip_undecodable: Skip files that cannot be decoded, instead of raising an error.
        options: Names of these in messages.
    """

    key: str = "text"
    skip_undecodable: bool = False
    options: OptionNames = PREPROCESS_OPTIONS
    undecodable: list[str] = attrs.field(factory=list, init=False)
    """Skipped files."""
    problems: list[str] = attrs.field(factory=list, init=False)

    def read(self, files: Sequence[InputFile]) -> Iterator[Document]:
        """Yield all documents, in order.

        Raises:
            DataError: Invalid JSON, missing keys or undecodable text; raised at the end, or after
                many errors.
        """
        self.undecodable.clear()
        self.problems.clear()
        readers: dict[str, Callable[[Path], Iterator[Document]]] = {
            "jsonl": self._json_lines,
            "records": self._records,
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
            raise DataError("cannot read the input", [*self.problems, "... and possibly more"])

    def _undecodable(self, path: Path, reason: str) -> None:
        if self.skip_undecodable:
            self.undecodable.append(str(path))
        else:
            skip = self.options.skip_undecodable
            self._problem(
                f"{path}: {reason}; convert it to UTF-8{f', or pass {skip}' if skip else ''}"
            )

    def _text(self, path: Path) -> Iterator[Document]:
        content = path.read_bytes()
        try:
            yield Document(content.decode("utf-8-sig"), str(path), len(content))
        except UnicodeDecodeError as error:
            self._undecodable(path, f"not UTF-8 at byte {error.start}")

    def _python(self, path: Path) -> Iterator[Document]:
        """A Python module, in the encoding that it declares (PEP 263)."""
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

    def _records(self, path: Path) -> Iterator[Document]:
        """A table or a JSON array; each record is a document."""
        found = Problems(path)
        for row, record in read_records(path, found):
            source = f"{path}:{row}"
            if (text := self._text_of(record, source)) is not None:
                yield Document(text, source, len(text))
        for problem in found:
            self._problem(problem)

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
        return self._text_of(record, source)

    def _text_of(self, record: Mapping[str, Any], source: str) -> str | None:
        text = record.get(self.key)
        if not isinstance(text, str):
            has = f"{type(text).__name__}" if self.key in record else "nothing"
            keys = ", ".join(map(repr, sorted(record))) or "none"
            self._problem(
                f"{source}: expected text under key {self.key!r}, got {has}; its keys: {keys}; "
                f"choose with {self.options.key}"
            )
            return None
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self._problem(f"{source}: half of a surrogate pair at character {error.start}")
            return None
        return text
