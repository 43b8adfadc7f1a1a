"""A run folder is read whatever part of it is there; another folder is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.core.fingerprint.record import writer
from ascend_run.plugin_api import DataError
from ascend_run.tools.pages.config_rows import config_rows
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from ascend_run.tools.report.summary import summarize

from .run_folders import CONFIG, metrics_lines, write_run

FILES = ("config.toml", "plan.json", "plugins.lock.json", "metrics.jsonl", "log.jsonl")


def test_a_whole_run_has_no_problems(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "demo"))
    assert run.problems == ()
    assert run.name == "demo"
    assert len(run.warnings) == 2
    assert run.lock["ulysses"].version == "0.1.0"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_read(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / name).unlink()
    assert read_run(folder).problems == (f"{name} is missing",)


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "plugins.lock.json"])
@pytest.mark.parametrize("content", [b"\x00\xff = [", b'{"plugins": [', b"[" * 50_000])
def test_a_corrupt_file_is_named_and_the_rest_read(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / name).write_bytes(content)
    (problem,) = read_run(folder).problems
    assert problem.startswith(f"{name} is not valid")


def test_corrupt_lines_of_metrics_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    (problem,) = read_run(folder).problems
    assert "metrics.jsonl: line" in problem


def test_the_last_fingerprint_stands_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    with writer(folder, 0) as file:
        for step in (6, 7):
            values = {"loss": 1.0, "grad_norm": None, "parameters": None, "consumed_samples": 8}
            file.write({"step": step, "fingerprint": f"{step:016x}", **values})
    run = read_run(folder)
    assert run.fingerprint is not None
    assert (run.fingerprint.step, run.problems) == (7, ())
    write_report([run], folder / "report.html")
    assert "<code>0000000000000007</code>" in (folder / "report.html").read_text()


def test_fingerprints_of_another_format_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / "fingerprint.jsonl").write_text('{"event": "start", "format": 2}\n')
    (problem,) = read_run(folder).problems
    assert "has format 2" in problem


def test_a_plan_that_is_no_object_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / "plan.json").write_text("[1, 2]")
    assert read_run(folder).problems == ("plan.json holds no JSON object",)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="is not the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="no run folder"):
        read_run(tmp_path / "nowhere")


def test_the_origin_of_a_value_is_the_comment_behind_it(tmp_path: Path) -> None:
    rows = {row.name: row for row in read_run(write_run(tmp_path / "demo")).config_rows}
    assert rows["enable"].origin == "command line"
    assert rows["data.train"].value == '["data/train # 1"]'
    assert rows["data.train"].origin == "demo.toml:21"
    assert rows["plugins.swap-attention.keep_layers"].origin == "plugin default"
    assert [name for name in ("run.seed", "model.init_method_std") if rows[name].is_set] == []
    assert rows["model.num_layers"].is_set


def test_a_default_does_not_count_as_set() -> None:
    config = {"a": 1, "b": 1, "c": 1, "d": 1}
    text = "a = 1 # default\nb = 1 # plugin default\nc = 1 # Megatron's default\nd = 1 # x.toml:4\n"
    assert [row.key for row in config_rows(config, text, {}) if row.is_set] == ["d"]


def test_origins_of_the_plan_count_before_comments() -> None:
    (row,) = config_rows({"run": {"seed": 1}}, "[run]\nseed = 1 # file\n", {"run.seed": "plan"})
    assert row.origin == "plan"


def test_the_headline_of_a_finished_run(tmp_path: Path) -> None:
    summary = summarize(read_run(write_run(tmp_path / "demo")))
    assert summary.status == "finished"
    assert summary.loss is not None
    assert (summary.loss.name, summary.loss.start) == ("held-out", 8.3242)
    assert summary.loss.percent == pytest.approx(100 * summary.loss.end / 8.3242)
    assert (summary.last_step, summary.total_steps) == (400, 400)
    assert summary.tokens == 400 * 8 * 512
    assert summary.attempts == 2
    assert summary.peak_memory_bytes == 1_480_000_000


def test_the_duration_leaves_out_the_time_between_attempts(tmp_path: Path) -> None:
    lines = [
        {"event": "start", "time": 100.0},
        {"step": 1, "loss": 1.0, "time": 160.0},
        {"event": "resume", "step": 1, "time": 9000.0},
        {"step": 2, "loss": 1.0, "time": 9030.0},
    ]
    summary = summarize(read_run(write_run(tmp_path / "demo", lines=lines)))
    assert summary.seconds == 90.0


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    lines = [*metrics_lines(20)[:-1], {"event": "failure", "error": "RankFailure: rank 1 died"}]
    summary = summarize(read_run(write_run(tmp_path / "demo", lines=lines)))
    assert (summary.status, summary.message) == ("failed", "RankFailure: rank 1 died")


def test_a_run_that_continues_after_a_failure_is_unfinished(tmp_path: Path) -> None:
    lines = [
        {"event": "start"},
        {"step": 1, "loss": 1.0},
        {"event": "failure", "error": "x"},
        {"event": "resume", "step": 1},
    ]
    assert summarize(read_run(write_run(tmp_path / "demo", lines=lines))).status == "unfinished"


def test_without_held_out_data_the_training_loss_is_the_headline(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": "NaN"}, {"step": 3, "loss": 1.0}]
    loss = summarize(read_run(write_run(tmp_path / "demo", lines=lines))).loss
    assert loss is not None
    assert (loss.name, loss.start, loss.end, loss.percent) == ("training", 4.0, 1.0, 25.0)


def test_a_run_without_a_single_step_has_an_empty_headline(tmp_path: Path) -> None:
    summary = summarize(read_run(write_run(tmp_path / "demo", lines=[], config=CONFIG)))
    assert (summary.loss, summary.last_step, summary.seconds) == (None, None, None)
