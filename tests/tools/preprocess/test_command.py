"""``ascend-run preprocess`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.text.dataset_checks import check_dataset
from ascend_run.text.dataset_paths import bin_path
from ascend_run.text.tokenizer import fingerprint_of

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run it on ``tmp_path/in`` with output below ``tmp_path/out``; with a limit of the system in a
    process of its own."""

    def command(*options: str, source: str = "in", limit: str = "") -> CompletedProcess[str]:
        paths = ["--input", f"{tmp_path}/{source}", "--output-prefix", f"{tmp_path}/out/train"]
        words = ["preprocess", *paths, *options]
        if limit:
            program = f"{limit}\nfrom ascend_run.entrypoints.cli import main\nmain()"
            own = [sys.executable, "-c", program, *words]
            return subprocess.run(own, capture_output=True, text=True, timeout=60, check=False)
        capsys.readouterr()
        code = run(words)
        return CompletedProcess(words, code, *capsys.readouterr())

    return command


@pytest.fixture(autouse=True)
def modules(tmp_path: Path) -> None:
    """A small tree of Python files, two of them equal."""
    (tmp_path / "in").mkdir()
    for number in range(40):
        text = f'"""Module {number}."""\n\nVALUE = {number} * {number + 1}\n'
        (tmp_path / "in" / f"module{number}.py").write_text(text)
    (tmp_path / "in" / "copy.py").write_text((tmp_path / "in" / "module0.py").read_text())


def test_it_makes_a_tokenizer_and_two_datasets_and_tells_what_it_did(
    command: Command, tmp_path: Path
) -> None:
    done = command(
        "--format=python",
        "--train-tokenizer=300",
        "--holdout=0.3",
        f"--heldout-prefix={tmp_path}/out/heldout",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("read 41 files")
    assert "dropped 1 duplicates, 0 empty documents" in lines
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "tokenizer.json",
        *(f"{part}.{suffix}" for part in ("train", "heldout") for suffix in ("bin", "idx", "json")),
    }
    train, heldout = (check_dataset(tmp_path / "out" / part) for part in ("train", "heldout"))
    assert train.documents + heldout.documents == 40
    assert any(f"{train.tokens:,} tokens" in line for line in lines)


def test_json_gives_the_report_as_one_object(command: Command, tmp_path: Path) -> None:
    done = command("--train-tokenizer=300", "--json")
    report = json.loads(done.stdout)
    assert report["train"]["documents"] == 40
    assert report["train"]["prefix"] == f"{tmp_path}/out/train"
    assert report["heldout"] is None
    assert report["duplicates"] == 1


def test_the_files_do_not_depend_on_the_number_of_workers(command: Command, tmp_path: Path) -> None:
    contents = []
    for workers in (1, 2):
        done = command("--train-tokenizer=300", f"--workers={workers}", "--overwrite")
        assert done.returncode == 0
        contents.append(bin_path(tmp_path / "out" / "train").read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        ((), "in", "give either --tokenizer PATH or --train-tokenizer VOCAB_SIZE"),
        (("--train-tokenizer=10",), "in", "at least 257"),
        (("--train-tokenizer=300",), "none", "none: no such file or folder"),
        (("--train-tokenizer=300", "--format=text"), "in", "no files ending in"),
        (("--tokenizer=missing.json",), "in", "missing.json does not exist"),
        (("--train-tokenizer=300", "--holdout=2"), "in", "below 1, got 2.0"),
        (("--train-tokenizer=300", "--json-key=body"), "bad.jsonl", "bad.jsonl:1: expected text"),
        (("--train-tokenizer=300",), "latin.txt", "latin.txt: not UTF-8 at byte 3"),
        (("--train-tokenizer=300",), "empty.txt", "no documents in 1 files"),
        (("--train-tokenizer=300", "--tokenizer-out=/proc/no/t.json"), "in", "cannot write /proc"),
        (("--workers=0",), "in", "--workers"),
        (("--format=parquet",), "in", "'parquet' is not one of"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(
    command: Command, tmp_path: Path, options: tuple[str, ...], source: str, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    done = command(*options, source=source)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.glob("out/*"))


def test_existing_output_is_kept_by_default(command: Command, tmp_path: Path) -> None:
    assert command("--train-tokenizer=300").returncode == 0
    before = bin_path(tmp_path / "out" / "train").read_bytes()
    again = command("--train-tokenizer=290")
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert bin_path(tmp_path / "out" / "train").read_bytes() == before
    assert command("--train-tokenizer=290", "--overwrite").returncode == 0
    assert bin_path(tmp_path / "out" / "train").read_bytes() != before


def test_an_output_that_is_the_input_is_refused_by_all_its_names(
    command: Command, tmp_path: Path
) -> None:
    source = tmp_path / "in" / "module1.py"
    before = source.read_bytes()
    done = command(
        "--train-tokenizer=300",
        f"--tokenizer-out={source}",
        "--holdout=0.3",
        f"--heldout-prefix={tmp_path}/out/../out/train",
        "--overwrite",
    )
    assert done.returncode == 2
    assert f"the trained tokenizer ({source}) would overwrite the input ({source})" in done.stderr
    assert "the record of --output-prefix" in done.stderr
    assert source.read_bytes() == before
    assert not list(tmp_path.glob("out/*"))


def test_the_tokenizer_in_a_folder_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    assert command("--train-tokenizer=300").returncode == 0
    tokenizer = tmp_path / "out" / "tokenizer.json"
    before = tokenizer.read_bytes()
    own = f"--output-prefix={tmp_path}/out/tokenizer"
    done = command(f"--tokenizer={tmp_path}/out", own, "--overwrite")
    assert done.returncode == 2
    assert f"would overwrite --tokenizer ({tokenizer})" in done.stderr
    assert tokenizer.read_bytes() == before


@pytest.mark.parametrize("linked", [False, True])
def test_the_tokenizer_of_another_dataset_is_not_replaced(
    command: Command, tmp_path: Path, linked: bool
) -> None:
    """Its record tells; the dataset that is made again itself does not count."""
    first = tmp_path / "out" / "first"
    assert command("--train-tokenizer=300", f"--output-prefix={first}").returncode == 0
    tokenizer = tmp_path / "out" / "tokenizer.json"
    before = tokenizer.read_bytes()
    folder = tmp_path / "out"
    if linked:
        folder = tmp_path / "link"
        folder.symlink_to("out")
    second = f"--output-prefix={folder}/second"
    done = command("--train-tokenizer=290", second, "--overwrite")
    assert done.returncode == 2
    assert f"the trained tokenizer ({folder}/tokenizer.json) would replace" in done.stderr
    assert f"the tokenizer that {first} was made with" in done.stderr
    assert "--tokenizer-out" in done.stderr
    assert tokenizer.read_bytes() == before
    check_dataset(first, fingerprint_of(before.decode()))

    own = f"--output-prefix={folder}/first"
    assert command("--train-tokenizer=290", own, "--overwrite").returncode == 0
    assert (
        command("--train-tokenizer=280", second, f"--tokenizer-out={folder}/own.json").returncode
        == 0
    )
    assert tokenizer.read_bytes() != before


def test_a_file_system_that_takes_no_more_is_one_message(command: Command, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))"
    done = command("--train-tokenizer=300", limit=limit)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*"))
