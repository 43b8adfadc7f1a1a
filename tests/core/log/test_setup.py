"""The log: events with fields, to the file on every rank and to the console on the first."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog

from ascend_run.core.log.setup import configure_logging
from ascend_run.plugin_api import StorageError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_stands_in_the_file_with_its_fields_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with configure_logging(path, rank=0) as log:
        log.logger.info("plugin.enabled", plugin="ulysses", order=1)
    (line,) = lines(path)
    assert line.pop("time") > 1e9
    assert line == {
        "level": "info",
        "rank": 0,
        "event": "plugin.enabled",
        "plugin": "ulysses",
        "order": 1,
    }


def test_a_logger_that_any_module_asks_for_goes_to_the_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    elsewhere = structlog.get_logger()
    with configure_logging(path, rank=0):
        elsewhere.warning("checkpoint.corrupt", step=3)
    assert lines(path)[0]["event"] == "checkpoint.corrupt"


def test_rank_zero_logs_to_standard_error_not_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with configure_logging(None, rank=0) as log:
        log.logger.info("run.start", world_size=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "run.start" in captured.err
    assert "world_size=2" in captured.err
    assert "rank" not in captured.err


def test_other_ranks_are_silent_on_the_console_and_write_warnings_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    with configure_logging(path, rank=3) as log:
        log.logger.info("step.slow")
        log.logger.warning("memory.high", bytes=5)
    assert [(line["event"], line["rank"]) for line in lines(path)] == [("memory.high", 3)]
    assert capsys.readouterr().err == ""


def test_the_level_decides_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with configure_logging(path, rank=0, level="warning") as log:
        log.logger.info("a.detail")
        log.logger.warning("a.concern")
    assert [line["event"] for line in lines(path)] == ["a.concern"]


def test_python_warnings_and_foreign_records_are_events_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with configure_logging(path, rank=1):
            warnings.warn("odd shape", UserWarning, stacklevel=1)
            logging.getLogger("megatron.core").warning("slow path for %s", "rope")
            logging.getLogger("megatron.core").log(35, "between the levels")
            logging.getLogger("megatron.core").critical("broken")
    first, second, third, fourth = lines(path)
    assert (first["event"], first["message"], first["kind"]) == (
        "python.warning",
        "odd shape",
        "UserWarning",
    )
    assert (second["event"], second["message"]) == ("python.log", "slow path for rope")
    assert second["source"] == "megatron.core"
    assert (third["level"], fourth["level"]) == ("warning", "error")


def test_an_exception_is_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with configure_logging(path, rank=0) as log:
        try:
            raise ValueError("seven is not even")
        except ValueError:
            log.logger.exception("run.failure")
    assert "ValueError: seven is not even" in lines(path)[0]["exception"]


def test_closing_puts_everything_back(tmp_path: Path) -> None:
    before = structlog.get_config()
    handlers = list(logging.getLogger().handlers)
    show = warnings.showwarning
    log = configure_logging(tmp_path / "log.jsonl", rank=0)
    assert structlog.get_config() != before
    log.close()
    log.close()
    assert structlog.get_config() == before
    assert logging.getLogger().handlers == handlers
    assert warnings.showwarning is show


def test_a_run_appends_to_the_log_of_the_attempt_before(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for attempt in (1, 2):
        with configure_logging(path, rank=0) as log:
            log.logger.info("run.start", attempt=attempt)
    assert [line["attempt"] for line in lines(path)] == [1, 2]


def test_ranks_that_write_at_once_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import sys, pathlib\n"
        "from ascend_run.core.log.setup import configure_logging\n"
        "with configure_logging(pathlib.Path(sys.argv[1]), rank=int(sys.argv[2])) as log:\n"
        "    for number in range(300): log.logger.warning('noise', number=number, text='x' * 500)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(rank)], stderr=subprocess.DEVNULL
        )
        for rank in range(3)
    ]
    for process in ranks:
        assert process.wait(timeout=60) == 0
    written = [(line["rank"], line["number"]) for line in lines(path)]
    assert sorted(written) == [(rank, number) for rank in range(3) for number in range(300)]


def test_the_file_is_private_to_owner_and_group(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        configure_logging(tmp_path / "log.jsonl", rank=0).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o640


def test_the_console_follows_a_replaced_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with configure_logging(None, rank=0) as log:
        replaced = io.StringIO()
        monkeypatch.setattr(sys, "stderr", replaced)
        log.logger.info("run.start")
    assert "run.start" in replaced.getvalue()


def test_importing_the_package_loads_neither_structlog_nor_rich() -> None:
    code = (
        "import sys, ascend_run.core.log.setup, ascend_run.core.log.progress, "
        "ascend_run.core.log.metrics\n"
        "assert not {'structlog', 'rich', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_full_disk_is_recognized_in_library_errors_and_raised_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    with configure_logging(path, rank=1) as log:
        logging.getLogger("library").error("three times")
        logging.getLogger("library").error("three times")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("of a library", UserWarning, stacklevel=1)
        told = capfd.readouterr().err
        with pytest.raises(StorageError, match="No space left on device"):
            log.logger.error("run.event")
    assert told.count("No space left on device") == 1
    assert "Traceback" not in told
