"""``ascend-run report``: the command around the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ascend_run.core.log.metrics import MetricsWriter
from ascend_run.entrypoints.cli import run
from ascend_run.tools.report.command import command
from tests.tools.report.run_folders import write_run


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that the command asked the system to open."""
    addresses: list[str] = []
    monkeypatch.setattr(click, "launch", lambda address: addresses.append(address) or 0)
    return addresses


def test_the_page_is_written_into_the_run_folder(tmp_path: Path, opened: list[str]) -> None:
    folder = write_run(tmp_path / "demo")
    result = CliRunner().invoke(command, [str(folder)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "held-out loss: 8.3242 -> 3.9548 (47.5 %)",
        f"report: {folder / 'report.html'}",
    ]
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert opened == [], "nobody sits in front of a test"


def test_open_yes_opens_the_page(tmp_path: Path, opened: list[str]) -> None:
    folder = write_run(tmp_path / "a b")
    CliRunner().invoke(command, [str(folder), "--open", "yes"], catch_exceptions=False)
    assert opened == [(folder / "report.html").as_uri()]


def test_another_file_can_be_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    target = tmp_path / "page.html"
    CliRunner().invoke(command, [str(folder), "--output", str(target)], catch_exceptions=False)
    assert target.exists()
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "log.jsonl", "plan.json"])
def test_a_page_that_would_overwrite_a_file_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    before = (two / name).read_bytes()
    (tmp_path / "link").symlink_to(two)
    for target in (two / name, tmp_path / "link" / name):
        words = ["report", str(one), str(two), "--output", str(target)]
        assert run(words) == 2
        assert (two / name).read_bytes() == before


def test_several_runs_make_one_page(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    CliRunner().invoke(command, [str(one), str(two)], catch_exceptions=False)
    assert "Where the runs differ" in (one / "compare.html").read_text()
    assert not (one / "report.html").exists()


def test_json_holds_the_headline_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    result = CliRunner().invoke(command, [str(folder), "--json"], catch_exceptions=False)
    answer = json.loads(result.output)
    assert answer["report"] == str(folder / "report.html")
    (figures,) = answer["runs"]
    assert figures["run_dir"] == str(folder)
    assert figures["status"] == "finished"
    assert figures["loss"]["start"] == 8.3242
    assert figures["tokens"] == 1_638_400


def test_a_run_under_way_can_be_looked_at(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 1, "loss": 2.0})
        result = CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)
    assert result.output == f"report: {tmp_path / 'report.html'}\n"
    page = (tmp_path / "report.html").read_text()
    assert "unfinished" in page
    assert "config.toml is missing" in page


@pytest.mark.parametrize("name", ["no-run", "nowhere"])
def test_a_folder_that_is_no_run_ends_with_code_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "no-run").mkdir()
    assert run(["report", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert str(tmp_path / name) in captured.err
    assert "Traceback" not in captured.err


def test_no_folder_is_an_error_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report"]) == 2
    assert "RUN_DIRS" in capsys.readouterr().err


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    code = (
        "import sys\n"
        "from ascend_run.entrypoints.cli import run\n"
        "assert run(['report', sys.argv[1], '--open', 'no']) == 0\n"
        "assert not {'torch', 'structlog', 'rich', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], timeout=60, check=True)
