"""From text to token files: what is kept, where it goes, and that nothing half-done appears."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from ascend_run.plugin_api import AscendRunError, ConfigError, DataError, StorageError
from ascend_run.text.corpus import content_digest, is_held_out
from ascend_run.text.dataset_checks import check_dataset
from ascend_run.text.tokenizer import load_tokenizer
from ascend_run.tools.preprocess.options import PreprocessOptions
from ascend_run.tools.preprocess.writing import PreprocessReport, preprocess
from tests.core.data.reference import read_documents

SENTENCE = "the model reads one token after another and learns which comes next"


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture
def texts() -> list[str]:
    """Alike, and each with a word of its own that a tokenizer would learn."""
    own = [Random(n).randbytes(4).hex() for n in range(60)]
    return [f"{SENTENCE[n % 30 :]} {word} {word}\n" for n, word in enumerate(own)]


def run(tmp_path: Path, *inputs: Path, **options: Any) -> PreprocessReport:
    options = {"train_vocab_size": 300, **options}
    return preprocess(
        PreprocessOptions(inputs=inputs, output_prefix=tmp_path / "out" / "train", **options)
    )


def decoded(report: PreprocessReport, prefix: str) -> list[str]:
    tokenizer = load_tokenizer(report.tokenizer)
    return [tokenizer.decode(document) for document in read_documents(Path(prefix))]


def test_every_document_can_be_read_back_with_its_end_marked(
    tmp_path: Path, texts: list[str]
) -> None:
    report = run(tmp_path, write_texts(tmp_path / "in", texts))
    assert decoded(report, report.train.prefix) == [f"{text}<|endoftext|>" for text in texts]
    facts = check_dataset(report.train.prefix, report.tokenizer_sha256)
    assert facts.documents == report.train.documents == len(texts)
    assert facts.tokens == report.train.tokens
    assert facts.sidecar is not None
    assert facts.sidecar.append_eod


def test_the_end_mark_can_be_left_out(tmp_path: Path, texts: list[str]) -> None:
    report = run(tmp_path, write_texts(tmp_path / "in", texts), append_eod=False)
    assert decoded(report, report.train.prefix) == texts


def test_copies_and_empty_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", ["a b", "a  b\n", "", " \n\t", "c", "\na b", "c"])
    report = run(tmp_path, source)
    assert decoded(report, report.train.prefix) == ["a b<|endoftext|>", "c<|endoftext|>"]
    assert (report.duplicates, report.empty) == (3, 2)


def test_held_out_documents_are_disjoint_from_training_data(
    tmp_path: Path, texts: list[str]
) -> None:
    """Copies that differ only in white space stay in one split."""
    copies = [text.replace(" ", "\n  ") for text in texts]
    report = run(tmp_path, write_texts(tmp_path / "in", texts + copies), holdout=0.3)
    assert report.heldout is not None
    train = {content_digest(text) for text in decoded(report, report.train.prefix)}
    heldout = {content_digest(text) for text in decoded(report, report.heldout.prefix)}
    assert report.duplicates == len(texts)
    assert len(train) + len(heldout) == len(texts)
    assert not train & heldout
    assert 5 <= len(heldout) <= 35
    assert report.heldout.prefix == f"{tmp_path}/out/train-heldout"


def test_adding_and_renaming_files_moves_no_document_to_the_other_side(
    tmp_path: Path, texts: list[str]
) -> None:
    first = run(tmp_path, write_texts(tmp_path / "in", texts), holdout=0.3)
    assert first.heldout is not None
    before = set(decoded(first, first.heldout.prefix))
    more = [f"new {text}" for text in texts]
    source = write_texts(tmp_path / "other", more + texts[::-1])
    second = run(tmp_path, source, holdout=0.3, overwrite=True)
    assert second.heldout is not None
    after = set(decoded(second, second.heldout.prefix))
    assert before == {text for text in after if not text.startswith("new")}


def test_the_held_out_share_is_near_the_fraction() -> None:
    for fraction in (0.01, 0.25):
        digests = [content_digest(str(number)) for number in range(20_000)]
        share = sum(is_held_out(digest, fraction) for digest in digests) / len(digests)
        assert share == pytest.approx(fraction, rel=0.15)


def test_the_tokenizer_is_trained_without_the_held_out_documents(
    tmp_path: Path, texts: list[str]
) -> None:
    source = write_texts(tmp_path / "in", texts)
    whole = run(tmp_path, source, holdout=0.3, train_vocab_size=600)
    assert whole.heldout is not None
    for path in source.iterdir():
        if is_held_out(content_digest(path.read_text()), 0.3):
            path.unlink()
    # The held-out documents of before still need the tokenizer beside them.
    own = tmp_path / "alone.json"
    alone = run(tmp_path, source, overwrite=True, train_vocab_size=600, tokenizer_out=own)
    assert alone.tokenizer_sha256 == whole.tokenizer_sha256
    assert alone.train == whole.train


def test_a_given_tokenizer_is_used_and_left_alone(tmp_path: Path, texts: list[str]) -> None:
    source = write_texts(tmp_path / "in", texts)
    first = run(tmp_path, source)
    content = Path(first.tokenizer).read_bytes()
    second = preprocess(
        PreprocessOptions(
            inputs=(source,), output_prefix=tmp_path / "again", tokenizer=Path(first.tokenizer)
        )
    )
    assert second.tokenizer_sha256 == first.tokenizer_sha256
    assert Path(first.tokenizer).read_bytes() == content
    assert read_documents(tmp_path / "again") == read_documents(Path(first.train.prefix))


def test_the_result_does_not_depend_on_how_documents_are_batched(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_texts(tmp_path / "in", texts)
    first = run(tmp_path, source)
    content = Path(f"{first.train.prefix}.bin").read_bytes()
    monkeypatch.setattr("ascend_run.text.corpus._BATCH_DOCUMENTS", 7)
    second = run(tmp_path, source, overwrite=True)
    assert Path(f"{second.train.prefix}.bin").read_bytes() == content


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet", "jsonl.gz"])
def test_every_format_gives_the_bytes_of_json_lines(
    tmp_path: Path, texts: list[str], suffix: str
) -> None:
    table = pa.table({"text": texts, "n": [*range(len(texts))]})
    path = tmp_path / f"a.{suffix}"
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    if suffix == "parquet":
        pa.parquet.write_table(table, path)
    elif suffix == "csv":
        pa.csv.write_csv(table, path)
    elif suffix == "json":
        path.write_text(json.dumps(table.to_pylist()))
    else:
        path.write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl").write_text(lines)
    run(tmp_path / "lines", tmp_path / "a.jsonl")
    run(tmp_path / "table", path)
    for name in ("out/train.bin", "out/train.idx", "out/train.json"):
        assert (tmp_path / "table" / name).read_bytes() == (tmp_path / "lines" / name).read_bytes()


def test_progress_reaches_the_end_of_each_stage(tmp_path: Path, texts: list[str]) -> None:
    seen: dict[str, list[int]] = {}
    source = write_texts(tmp_path / "in", texts)
    options = PreprocessOptions(
        inputs=(source,), output_prefix=tmp_path / "out", train_vocab_size=300
    )
    report = preprocess(options, lambda stage, done, total: seen.setdefault(stage, []).append(done))
    assert list(seen) == ["training the tokenizer", "tokenising"]
    for done in seen.values():
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, report.input_bytes)
        assert len(done) > 10


def test_contradictory_options_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        run(
            tmp_path,
            tokenizer=Path("t"),
            holdout=1.5,
            heldout_prefix=tmp_path / "out" / "train",
        )
    assert [problem.split()[0] for problem in refusal.value.problems[:2]] == ["give", "--holdout"]
    both = [str(tmp_path / "out" / f"train.{suffix}") for suffix in ("bin", "idx", "json")]
    assert all(path in told for path, told in zip(both, refusal.value.problems[2:], strict=True))


COLLIDING: dict[str, dict[str, Any]] = {
    "tokenizer over the record": {"tokenizer_out": "out/train.json"},
    "tokenizer over the record, by a link": {"tokenizer_out": "other-name/train.json"},
    "tokenizer over the index": {"tokenizer_out": "in/../out/train.idx"},
    "record over the default tokenizer": {"output_prefix": "out/tokenizer"},
    "record over the held-out record": {"holdout": 0.3, "heldout_prefix": "other-name/train"},
    "held-out record over the tokenizer": {
        "holdout": 0.3, "heldout_prefix": "out/x", "tokenizer_out": "out/x.json",
    },
    "record over the given tokenizer": {
        "tokenizer": "out/train.json", "train_vocab_size": None,
    },
    "record over an input": {"inputs": ["out/train.json"], "format": "text"},
    "tokenizer over an input": {"tokenizer_out": "in/000.txt"},
    "tokenizer over an input, by a hard link": {"tokenizer_out": "out/hard"},
}  # fmt: skip


@pytest.mark.parametrize("case", COLLIDING)
def test_no_output_may_overwrite_an_input_or_an_output(
    tmp_path: Path, texts: list[str], case: str
) -> None:
    trained = run(tmp_path, write_texts(tmp_path / "in", texts)).tokenizer
    (tmp_path / "other-name").symlink_to("out")
    (tmp_path / "out/train.json").write_text(Path(trained).read_text())
    (tmp_path / "out/hard").hardlink_to(tmp_path / "in/000.txt")
    given = {
        key: tmp_path / value if isinstance(value, str) and "/" in value else value
        for key, value in COLLIDING[case].items()
    }
    inputs = tuple(tmp_path / name for name in given.pop("inputs", ["in"]))
    prefix = given.pop("output_prefix", tmp_path / "out/train")
    before = contents(tmp_path)
    options = {"train_vocab_size": 300, "overwrite": True, **given}
    with pytest.raises(ConfigError, match=r"would overwrite|are the same file"):
        preprocess(PreprocessOptions(inputs=inputs, output_prefix=prefix, **options))
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_output_beside_its_input_is_no_collision(tmp_path: Path, texts: list[str]) -> None:
    source = write_texts(tmp_path / "in", texts)
    first = contents(source)
    for _ in range(2):
        preprocess(
            PreprocessOptions(
                inputs=(source,),
                output_prefix=source / "train",
                train_vocab_size=300,
                overwrite=True,
            )
        )
    assert first.items() <= contents(source).items()


def test_a_tokenizer_without_an_end_of_document_is_refused(
    tmp_path: Path, texts: list[str]
) -> None:
    source = write_texts(tmp_path / "in", texts)
    tokenizer = tmp_path / "tokenizer.json"
    content = Path(run(tmp_path, source).tokenizer).read_text()
    tokenizer.write_text(content.replace("<|endoftext|>", "<unk>"))
    with pytest.raises(DataError, match="--end-token"):
        run(tmp_path, source, tokenizer=tokenizer, train_vocab_size=None, overwrite=True)
    marked = run(
        tmp_path,
        source,
        tokenizer=tokenizer,
        train_vocab_size=None,
        end_token="<unk>",
        overwrite=True,
    )
    assert marked.eod == 0


@pytest.mark.parametrize(
    ("texts", "options", "reason"),
    [
        (["", " "], {}, "no documents in 2 files: 2 were empty"),
        (["one document"], {"holdout": 0.5}, "--holdout 0.5"),
        (["a"], {"format": "python"}, "no files ending in .py"),
    ],
)
def test_input_without_documents_is_refused_and_nothing_appears(
    tmp_path: Path, texts: list[str], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        run(tmp_path, write_texts(tmp_path / "in", texts), **options)
    assert list((tmp_path / "out").glob("*")) == []


@pytest.mark.parametrize("stage", ["training", "tokenising"])
def test_a_flaw_in_the_input_publishes_nothing(
    tmp_path: Path, texts: list[str], stage: str
) -> None:
    tokenizer = Path(run(tmp_path, write_texts(tmp_path / "in", texts)).tokenizer)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text":\n')
    options = {"train_vocab_size": 300} if stage == "training" else {"tokenizer": tokenizer}
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        preprocess(
            PreprocessOptions(
                inputs=(tmp_path / "bad.jsonl",), output_prefix=tmp_path / "new" / "p", **options
            )
        )
    assert list((tmp_path / "new").glob("*")) == []


def test_a_full_disk_leaves_the_earlier_dataset_whole(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_texts(tmp_path / "in", texts)
    report = run(tmp_path, source)
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(files) == 4

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        run(tmp_path, source, overwrite=True, append_eod=False)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    check_dataset(report.train.prefix, report.tokenizer_sha256)


class Stopping:
    """Ends the process, as it were, instead of the call after ``calls``."""

    def __init__(self, function: Callable[..., None], calls: int) -> None:
        self.function, self.calls = function, calls

    def __call__(self, *arguments: Any) -> None:
        if not self.calls:
            raise SystemExit
        self.calls -= 1
        self.function(*arguments)


def test_a_publication_that_stops_between_two_files_is_noticed(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any rename, the folder holds the old dataset or a mix that is refused."""
    source = write_texts(tmp_path / "in", texts)
    options = {"tokenizer": Path(run(tmp_path, source).tokenizer), "train_vocab_size": None}
    for renames in range(3):
        run(tmp_path, source, overwrite=True, **options)
        # As many tokens and documents as before, so that no size gives the mix away.
        changed = write_texts(tmp_path / f"other{renames}", texts[::-1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", Stopping(os.replace, renames))
            with pytest.raises(SystemExit):
                run(tmp_path, changed, overwrite=True, **options)
        if renames == 0:
            check_dataset(tmp_path / "out" / "train")
        else:
            with pytest.raises(AscendRunError):
                check_dataset(tmp_path / "out" / "train")


def test_the_record_is_published_after_its_files(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    replace = os.replace

    def recording(source: Path, target: Path) -> None:
        names.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recording)
    report = run(tmp_path, write_texts(tmp_path / "in", texts), holdout=0.3)
    assert names[0] == "tokenizer.json"
    for prefix in ("train", "train-heldout"):
        places = [names.index(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "json")]
        assert places == sorted(places)
    record = json.loads(Path(f"{report.train.prefix}.json").read_text())
    assert record["format"] == "ascend-run token dataset"
    assert record["bin"]["size_bytes"] == Path(f"{report.train.prefix}.bin").stat().st_size
