"""Which files are found, what is read from them, and what is said of their flaws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_run.plugin_api import DataError
from ascend_run.text.document_files import Reader, find_files


def texts(paths: list[Path], format: str = "auto", **options: object) -> list[str]:
    return [document.text for document in Reader(**options).read(find_files(paths, format))]


def test_folders_give_sorted_files_without_caches_and_hidden_files(
    tmp_path: Path,
) -> None:
    """Only known suffixes; installed packages are skipped too."""
    for name in (
        "b.txt",
        "a/c.py",
        "a/d.jsonl",
        "a/__pycache__/e.py",
        "site-packages/f.py",
        ".hidden/g.txt",
        ".h.txt",
        "i.bin",
        "train.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = {str(file.path.relative_to(tmp_path)): file.format for file in find_files([tmp_path])}
    assert list(found.items()) == [("a/c.py", "python"), ("a/d.jsonl", "jsonl"), ("b.txt", "text")]
    assert [file.path.name for file in find_files([tmp_path], "python")] == ["c.py"]


def test_a_named_file_is_read_in_the_named_format_and_once(tmp_path: Path) -> None:
    path = tmp_path / "notes.log"
    path.write_text("hello")
    assert texts([path, path], "text") == ["hello"]


def test_all_missing_and_unknown_inputs_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as refusal:
        find_files([tmp_path / "none", tmp_path / "a.log", tmp_path / "empty"])
    missing, unknown, empty = refusal.value.problems
    assert "none: no such file" in missing
    assert "--format jsonl|records|text|python" in unknown
    assert "no files ending in" in empty


def test_json_lines_skip_blanks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "z\u00fcrich", "")]
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode())
    assert texts([path]) == ["one", "z\u00fcrich", ""]
    assert texts([tmp_path / "a.jsonl"]) == texts([tmp_path])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not a JSON object on one line"),
        (b"[" * 100_000, "not a JSON object on one line"),
        (b'["text"]', "expected a JSON object, got list"),
        (b'{"body": "a"}', "got nothing; its keys: 'body'"),
        (b'{"text": 5}', "got int"),
        (b'{"text": null}', "got NoneType"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_flawed_json_line_is_named_by_file_and_line(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as refusal:
        texts([path])
    (problem,) = refusal.value.problems
    assert problem.startswith(f"{path}:2: ")
    assert reason in problem


def test_several_flaws_are_reported_together_and_many_stop_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" * 3)
    with pytest.raises(DataError) as refusal:
        texts([path])
    assert len(refusal.value.problems) == 3
    path.write_text("{}\n" * 500)
    with pytest.raises(DataError) as refusal:
        texts([path])
    assert len(refusal.value.problems) == 21


def test_the_key_of_json_lines_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "here", "text": "not here"}\n')
    assert texts([path], key="body") == ["here"]


def test_undecodable_files_are_refused_or_left_out_and_listed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "c.py").write_bytes(b"# coding: rot13\n")
    (tmp_path / "d.txt").write_text("good")
    with pytest.raises(DataError) as refusal:
        texts([tmp_path])
    assert "a.txt: not UTF-8 at byte 3" in refusal.value.problems[0]
    assert len(refusal.value.problems) == 3
    reader = Reader(skip_undecodable=True)
    assert [document.text for document in reader.read(find_files([tmp_path]))] == ["good"]
    assert [Path(path).name for path in reader.undecodable] == ["a.txt", "b.py", "c.py"]


def test_python_files_are_read_in_the_encoding_they_declare(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = '\u00e9'\n"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    assert texts([tmp_path]) == [text]


def test_a_file_that_vanishes_between_finding_and_reading_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    files = find_files([path])
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        list(Reader().read(files))
