"""One and the same records in every format of files, and what is said of broken ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from ascend_run.text.sources import Problems, find_sources, read_records
from ascend_run.text.sources import json_files as json_module

RECORDS = [
    {"instruction": f'say "{n}",\nplease', "output": "é" * n + "{}[]\\", "system": "a, b"}
    for n in range(1, 8)
]


def read(path: Path) -> tuple[list[tuple[int, Mapping[str, Any]]], list[str]]:
    problems = Problems(path)
    return [*read_records(path, problems)], [*problems]


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(2, len(table) // 100))


def write_file(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(2, len(table) // 100))


def lines(records: list[Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_text(lines(RECORDS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(RECORDS).encode())),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS)),
    "indented.json": lambda path: path.write_text("\n " + json.dumps(RECORDS, indent=2) + "\n"),
    "lines.json": lambda path: path.write_text(lines(RECORDS)),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "a.csv": lambda path: pa.csv.write_csv(pa.Table.from_pylist(RECORDS), path),
    "a.parquet": lambda path: pa.parquet.write_table(
        pa.Table.from_pylist(RECORDS), path, row_group_size=3
    ),
    "stream.arrow": lambda path: write_stream(pa.Table.from_pylist(RECORDS), path),
    "file.arrow": lambda path: write_file(pa.Table.from_pylist(RECORDS), path),
    "any.suffix": lambda path: path.write_text(lines(RECORDS)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == ([*enumerate(RECORDS, start=1)], [])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11, 100])
def test_an_array_is_read_in_chunks_of_any_size(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    records = [*RECORDS, {"deep": [{"x": -1.5e-3, "y": [True, None]}], "u": "\u00e9\U0001f600"}]
    path.write_text(json.dumps(records))
    monkeypatch.setattr(json_module, "_CHUNK", chunk)
    assert read(path) == ([*enumerate(records, start=1)], [])


LARGE_ROWS = 60_000
_ROW = {"text": "word " * 200}


def large_table() -> pa.Table:
    return pa.Table.from_pylist([_ROW] * LARGE_ROWS)


def large_lines() -> str:
    return f"{json.dumps(_ROW)}\n" * LARGE_ROWS


def large_array() -> str:
    return "[" + ",\n".join([json.dumps(_ROW)] * LARGE_ROWS) + "]"


LARGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a.jsonl": (lambda path: path.write_text(large_lines()), "VmHWM"),
    "a.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(large_lines().encode(), 1)),
        "VmHWM",
    ),
    "a.json": (lambda path: path.write_text(large_array()), "VmHWM"),
    "a.json.gz": (
        lambda path: path.write_bytes(gzip.compress(large_array().encode(), 1)),
        "VmHWM",
    ),
    "a.parquet": (
        lambda path: pa.parquet.write_table(
            large_table(), path, row_group_size=500, compression="none", use_dictionary=False
        ),
        "VmHWM",
    ),
    "stream.arrow": (lambda path: write_stream(large_table(), path), "RssAnon"),
    "file.arrow": (lambda path: write_file(large_table(), path), "RssAnon"),
}
"""With what is counted: the peak, or of a mapped file the memory that no file backs.

Not ru_maxrss, which a process inherits from the one that starts it.
"""
_MEMORY = """
import sys
from pathlib import Path
import pyarrow.ipc, pyarrow.parquet
from ascend_run.text.sources import Problems, read_records

def kilobytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition(sys.argv[2] + ":")[2].split()[0])

path, rows, most = Path(sys.argv[1]), 0, 0
before = kilobytes()
for rows, _ in read_records(path, Problems(path)):
    if rows % 500 == 1:
        most = max(most, kilobytes())
print(rows, max(most, kilobytes()) - before)
"""


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_is_not_held_in_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write, counted = LARGE[name]
    write(path)
    assert path.suffix == ".gz" or path.stat().st_size > 60e6
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, path, counted],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == LARGE_ROWS
    assert kilobytes < 20_000


def test_a_null_of_a_table_is_a_key_that_is_missing(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": None, "c": [{"d": 1, "e": None}]}, {"a": None, "b": "y", "c": []}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found, _ = read(tmp_path / "a.parquet")
    assert found == [(1, {"a": "x", "c": [{"d": 1}]}), (2, {"b": "y", "c": []})]


def test_numbers_of_a_csv_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("instruction,output\n01,1e3\nnull,\n")
    found, _ = read(tmp_path / "a.csv")
    assert [values for _, values in found] == [
        {"instruction": "01", "output": "1e3"},
        {"instruction": "null", "output": ""},
    ]


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read(tmp_path / "a.txt") == ([(1, {"text": "one\ntwo\n"})], [])


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "deep/a.parquet", "deep/c.json.gz", ".hidden/x.jsonl", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found, problems = find_sources([tmp_path, tmp_path / "notes.md"])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["b.jsonl", "deep/a.parquet", "deep/c.json.gz", "notes.md"]
    assert problems == []
    assert find_sources([tmp_path / ".hidden"])[1] == []
    (tmp_path / "empty").mkdir()
    ((problem,)) = find_sources([tmp_path / "empty"])[1]
    assert problem.startswith(f"{tmp_path / 'empty'}: no files ending in .jsonl, .json, .csv")


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "array that ends": ("a.json", b'[{"a": 1}, {"a": ', "2: not a JSON array: Expecting value"),
    "array not closed": ("a.json", b'[{"a": 1}', "1: not a JSON array: it ends before ']'"),
    "no comma": ("a.json", b'[{"a": 1} {"a": 2}]', "1: not a JSON array: expected ',' or ']'"),
    "text after": ("a.json", b'[{"a": 1}] x', "1: not a JSON array: text follows its ']'"),
    "no object": ("a.json", b'[{"a": 1}, 2]', "2: expected a JSON object, found int"),
    "line": ("a.jsonl", b'{"a": 1}\n{"a"\n', "2: not JSON: Expecting ':' delimiter"),
    "gzip": ("a.jsonl.gz", b"{}", " cannot be read: Not a gzipped file"),
    "gzip cut": ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-12], " cannot be read: "),
    "bytes": ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "2: not UTF-8: byte 0xff at column 8"),
    "bytes in gzip": ("a.jsonl.gz", gzip.compress(b'{"a": "\xe9"}'), "1: not UTF-8: byte 0xe9 at "),
    "bytes in an array": ("a.json", b'[{"a": 1}, {"a": "\xff"}]', "2: not UTF-8: byte 0xff at "),
    "large integer": ("a.jsonl", b'{"a": 1}\n{"a": %s}' % (b"1" * 4301), "2: has an integer that "),
    "large integer in an array": ("a.json", b'[{"a": %s}]' % (b"1" * 4301), "1: has an integer "),
    "half a character": (
        "a.jsonl",
        b'{"a": "\\ud83d\\ude00"}\n{"a": ["\\uD800x"]}\n',
        "2: has \\ud800 without the other half of its surrogate pair",
    ),
    "half a character in an array": (
        "a.json",
        b'[{"a": "x"}, {"b\\udfff": "y"}]',
        "2: has \\udfff without the other half of its surrogate pair",
    ),
    "parquet": ("a.parquet", b"PAR1 no footer", " cannot be read: "),
    "arrow": ("a.arrow", b"ARROW1\0\0 nothing more", " cannot be read: "),
    "ragged": ("a.csv", b"a,b\n1,2\n3\n", "2: has 1 columns; the header has 2"),
    "empty csv": ("a.csv", b"", " cannot be read: "),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_with_its_row(tmp_path: Path, kind: str) -> None:
    name, content, expected = BROKEN[kind]
    (tmp_path / name).write_bytes(content)
    (problem,) = read(tmp_path / name)[1]
    separator = "" if expected.startswith(" ") else ":"
    assert problem.startswith(f"{tmp_path / name}{separator}{expected}")


def test_rows_of_a_csv_keep_their_numbers_after_broken_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n2\n3,4\n5,6,7\n8\n9,0\n')
    found, problems = read(tmp_path / "a.csv")
    assert found == [
        (1, {"a": "1", "b": "x\ny"}),
        (3, {"a": "3", "b": "4"}),
        (6, {"a": "9", "b": "0"}),
    ]
    starts = [problem.removeprefix(f"{tmp_path / 'a.csv'}:")[:8] for problem in problems]
    assert starts == ["2: has 1", "4: has 3", "5: has 1"]


_WITHOUT = """
import json, sys
from pathlib import Path
sys.modules["pyarrow"] = None
from ascend_run.text.sources import Problems, read_records
for name in sys.argv[1:]:
    problems = Problems(Path(name))
    print(json.dumps([[*read_records(Path(name), problems)], [*problems]]))
"""


def test_without_pyarrow_only_tables_are_refused(tmp_path: Path) -> None:
    names = ["a.jsonl", "a.json", "a.csv", "a.parquet", "file.arrow"]
    for name in names:
        WRITERS[name](tmp_path / name)
    paths = [str(tmp_path / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, *paths],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(rows) for rows, _ in told] == [7, 7, 0, 0, 0]
    for path, (_, problems) in zip(paths[2:], told[2:], strict=True):
        needs = "needs pyarrow, which is not installed: pip install 'ascend-run[data]'"
        assert problems == [f"{path} {needs}"]
