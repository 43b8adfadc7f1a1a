"""Read CSV, Parquet and Arrow files in batches of rows, by pyarrow, which is optional."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .problems import Problems

_ROWS: Final = 512
"""Rows of a Parquet file that are held at a time."""
_CSV_BLOCK: Final = 2**24
"""Bytes of a CSV file that are parsed at a time; no row may be larger."""
_ARROW_FILE: Final = b"ARROW1"
"""Beginning of Arrow's file format; its stream format has none."""

Rows = Iterator[tuple[int, dict[str, Any]]]


def table_columns(path: Path) -> frozenset[str] | None:
    """Return the columns of a table; None if the file is none or cannot be read."""
    try:
        if path.suffix == ".csv":
            return frozenset(_csv_names(path))
        if path.suffix == ".parquet":
            with _pyarrow("parquet").ParquetFile(path) as file:
                return frozenset(file.schema_arrow.names)
        if path.suffix == ".arrow":
            with _open_arrow(path) as reader:
                return frozenset(reader.schema.names)
    except (OSError, ValueError, ImportError):
        return None
    return None


def read_csv(path: Path, problems: Problems) -> Rows:
    """Yield the rows of a CSV file with a header; every value is a string."""
    skipped: list[int] = []

    def skip(row: Any) -> str:
        skipped.append(row.number - 1)  # the header is its row 1
        problems.add(
            f"has {row.actual_columns} columns; the header has {row.expected_columns}", skipped[-1]
        )
        return "skip"

    with _reported(problems):
        csv, text = _pyarrow("csv"), _pyarrow("").string()
        with csv.open_csv(
            path,
            # With threads, it does not number the rows that it skips.
            read_options=csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(_csv_names(path), text), strings_can_be_null=False
            ),
        ) as reader:
            before = 0
            for number, values in _rows(reader):
                while before < len(skipped) and skipped[before] <= number + before:
                    before += 1
                yield number + before, values


def _csv_names(path: Path) -> list[str]:
    csv = _pyarrow("csv")
    # The reader of the rows reports those that do not fit.
    options = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: "skip")
    with csv.open_csv(
        path, read_options=csv.ReadOptions(block_size=_CSV_BLOCK), parse_options=options
    ) as reader:
        return list(reader.schema.names)


def read_parquet(path: Path, problems: Problems) -> Rows:
    """Yield the rows of a Parquet file; a null is a key that is missing."""
    with _reported(problems), _pyarrow("parquet").ParquetFile(path) as file:
        yield from _rows(file.iter_batches(batch_size=_ROWS))


def read_arrow(path: Path, problems: Problems) -> Rows:
    """Yield the rows of an Arrow file, in the file format or the stream format."""
    with _reported(problems), _open_arrow(path) as reader:
        if hasattr(reader, "num_record_batches"):
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            yield from _rows(batches)
        else:
            yield from _rows(reader)


def _open_arrow(path: Path) -> Any:
    with path.open("rb") as stream:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
    ipc = _pyarrow("ipc")
    mapped = _pyarrow("").memory_map(str(path))
    return ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)


def _rows(batches: Iterable[Any]) -> Rows:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, _present(row)


def _present(value: Any) -> Any:
    """Leave out the keys without a value: a column holds every key of every row."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value


@contextmanager
def _reported(problems: Problems) -> Iterator[None]:
    """Report pyarrow's errors, and its absence, as problems of the file."""
    try:
        yield
    except ImportError:
        problems.add("needs pyarrow, which is not installed: pip install 'ascend-run[data]'")
    except UnicodeDecodeError:
        raise
    except (ValueError, NotImplementedError) as error:  # the bases of pyarrow's own
        problems.add(f"cannot be read: {' '.join(str(error).split())[:300]}")


def _pyarrow(module: str) -> Any:
    """Import pyarrow when a table is read."""
    return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
