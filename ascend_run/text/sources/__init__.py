"""Files of records, streamed: JSON, JSON lines, CSV, Parquet, Arrow, text. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from .json_files import read_json, read_json_lines
from .problems import Problems
from .tables import read_arrow, read_csv, read_parquet, table_columns

__all__ = ["SUFFIXES", "Problems", "find_sources", "read_records", "table_columns"]

Row: TypeAlias = tuple[int, Mapping[str, Any]]
"""Line or row, from 1, and its record."""


def _read_text(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the whole file as one record with the key ``text``."""
    yield 1, {"text": path.read_text(encoding="utf-8-sig")}


_READERS: Final[Mapping[str, Callable[[Path, Problems], Iterator[Row]]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": _read_text,
}
_COMPRESSED: Final = (".jsonl.gz", ".json.gz")
SUFFIXES: Final = (*_READERS, *_COMPRESSED)
"""What files in a folder end in; a file that is named may end in anything, and is JSON lines."""


def find_sources(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the files, with those in folders, sorted; and the problems, one sentence each.

    Hidden files and folders are skipped.
    """
    found: dict[Path, None] = {}
    problems: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found[path] = None
            continue
        within = [file for file in sorted(path.rglob("*")) if _counts(file, path)]
        found.update(dict.fromkeys(within))
        if not within:
            problems.append(f"{path}: no files ending in {', '.join(SUFFIXES)}")
    return [*found], problems


def _counts(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.name.endswith(SUFFIXES) and not hidden and file.is_file()


def read_records(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the records of one file, in order; what cannot be read goes to ``problems``."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    reader = _READERS.get(suffix, read_json_lines)
    try:
        yield from reader(path, problems)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        problems.add(f"cannot be read: {getattr(error, 'strerror', None) or error}")
