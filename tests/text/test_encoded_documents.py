"""Documents of a source are those of the token files that ``preprocess`` writes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.plugin_api import DataError, NoCache
from ascend_run.text.corpus import Corpus
from ascend_run.text.dataset_paths import is_source
from ascend_run.text.encoded_documents import encoded_documents
from ascend_run.text.indexed import read_index
from ascend_run.text.text_source import TextSource
from ascend_run.text.tokenizer import load_tokenizer, train_tokenizer
from ascend_run.tools.preprocess.options import PreprocessOptions
from ascend_run.tools.preprocess.writing import preprocess

TEXTS = [f"document {n}, " + "é\nand {more} " * (n % 7) for n in range(40)]
TEXTS += [" \n", TEXTS[0] + "\n"]
ROWS = [{"body": text, "other": n} for n, text in enumerate(TEXTS)]


def write_lines(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_folder(path: Path) -> None:
    path.mkdir()
    for n, text in enumerate(TEXTS):
        (path / f"{n:02}.{('txt', 'md')[n % 2]}").write_text(text)


def write_tables(path: Path) -> None:
    path.mkdir()
    write_arrow(path / "a.arrow")
    pa.parquet.write_table(pa.Table.from_pylist(ROWS[::-1]), path / "b.parquet")


SOURCES: dict[str, Callable[[Path], object]] = {
    "a.jsonl": write_lines,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": lambda path: pa.csv.write_csv(pa.Table.from_pylist(ROWS), path),
    "a.parquet": lambda path: pa.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "a.arrow": write_arrow,
    "a.txt": lambda path: path.write_text("\n".join(TEXTS)),
    "texts": write_folder,
    "tables": write_tables,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS, 300).to_json())
    return path


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "no ends"])
def test_documents_of_a_source_are_those_of_its_token_files(
    tmp_path: Path, tokenizer: Path, name: str, ends: bool
) -> None:
    SOURCES[name](tmp_path / name)
    options: dict[str, Any] = {"append_eod": ends, "format": "auto"}
    if name == "tables":
        options["format"] = "records"
    report = preprocess(
        PreprocessOptions(
            inputs=(tmp_path / name,), output_prefix=tmp_path / "out", tokenizer=tokenizer,
            json_key="body", **options,
        )
    )  # fmt: skip
    source = TextSource(path=str(tmp_path / name), key="body", **options)
    found = encoded_documents(source, load_tokenizer(tokenizer), NoCache())
    index = read_index(tmp_path / "out")
    assert np.array_equal(found.ids, index.ids())
    assert np.array_equal(found.sequence_lengths, index.lengths)
    assert (found.ids.dtype, found.sequence_lengths.dtype) == (index.dtype, index.lengths.dtype)
    assert found.report == {
        "documents": report.train.documents,
        "duplicates": report.duplicates,
        "empty": report.empty,
    }
    assert report.duplicates == (0 if name == "a.txt" else 42 if name == "tables" else 1)


def test_a_part_of_a_document_is_returned(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two, three"}\n')
    read = load_tokenizer(tokenizer)
    found = encoded_documents(TextSource(path=str(tmp_path / "a.jsonl")), read, NoCache())
    second = [*read.encoder.encode(["two, three"])[0], read.eod]
    assert found.get(1).tolist() == second
    assert found.get(1, offset=2).tolist() == second[2:]
    assert found.get(1, offset=1, length=2).tolist() == second[1:3]


def test_documents_are_encoded_again_when_an_input_changes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = Corpus.read
    monkeypatch.setattr(Corpus, "read", lambda corpus: reads.append(1) or read(corpus))
    cache, source = IndexCache(tmp_path / "cache"), TextSource(path=str(tmp_path / "a.jsonl"))
    counts = []
    for text in ("one", "one", "two"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "body": "b"}))
        encoded_documents(source, load_tokenizer(tokenizer), cache)
        counts.append(len(reads))
    assert counts == [1, 1, 2]
    for changed in (
        TextSource(path=source.path, key="body"),
        TextSource(path=source.path, append_eod=False),
        TextSource(path=source.path, format="text"),
    ):
        encoded_documents(changed, load_tokenizer(tokenizer), cache)
        counts.append(len(reads))
    assert counts[3:] == [3, 4, 5]


def test_a_source_without_documents_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n')
    source = TextSource(path=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"no documents in .*a\.jsonl: 1 were empty"):
        encoded_documents(source, load_tokenizer(tokenizer), NoCache())


def test_a_name_is_a_source_unless_token_files_have_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert is_source(tmp_path / "data")
    (tmp_path / "data.idx").touch()
    assert not is_source(tmp_path / "data")
    assert not is_source(tmp_path / "data.idx")
    assert not is_source(tmp_path / "missing.txt")
