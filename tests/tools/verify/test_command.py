"""The command from end to end, and what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.rank.failures import describe_failure
from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api.errors import PlatformError
from ascend_run.testing.pool import GlooPool, PoolError
from ascend_run.tools.verify.command import check_data, sorted_words
from ascend_run.tools.verify.compare.verdict import (
    Check,
    Exercise,
    Fault,
    ModuleDeviation,
    Outcome,
    Phase,
    Verdict,
)
from ascend_run.tools.verify.page import render
from ascend_run.tools.verify.table import text_of
from tests.support.command_line import imported_by

VERDICT = Verdict(
    outcome=Outcome.DIVERGES,
    fault=Fault(phase=Phase.BACKWARD, module="decoder.layers.0.<mlp>", why="its input"),
    checks=(
        Check(name="loss", against="plain", passed=True),
        Check(
            name="gradients",
            against="plain",
            passed=False,
            worst=float("inf"),
            eps=float("inf"),
            tolerance=1e-10,
            where="a.weight",
            details=("x & y", "second"),
        ),
        Check(name="losses", against="plain", passed=True, worst=3.14e-7, eps=2.6, tolerance=1e-5),
        Check(name="tied weights", against="itself", passed=True, applies=False),
    ),
    modules=(
        ModuleDeviation(module="embedding", forward=1e-16, backward=None),
        ModuleDeviation(module="decoder", forward=0.1, backward=float("inf")),
    ),
    question="a plugin on cp=2",
    declared={"a": "rounding"},
    references=("plain",),
    notes=("a note",),
    exercises=(Exercise(subject="a", exercised=False, why="it did nothing", fix="set a.b=1"),),
)


@pytest.mark.needs_plugins("ulysses")
def test_two_ranks_are_verified_from_end_to_end(tmp_path: Path) -> None:
    page = tmp_path / "verify.html"
    words = ["verify", "--enable", "ulysses", "cp=2", "--json", "--html", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "ascend_run", *words],
        # Megatron asks for torch's compiler when it is imported, a fifth of that import's time.
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stages = re.findall(r"^verify: +[\d.]+ s, (\d)/6: (.+)$", done.stderr, re.MULTILINE)
    assert [int(number) for number, _ in stages] == [*range(7)]
    assert stages[2][1] == "ulysses on cp=2"
    assert "the oracle" in {name for _, name in stages}
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert data["verdict"] == "within its declared numerics"
    assert data["declared"] == {"ulysses": "rounding"}
    assert all(check["passed"] for check in data["checks"])
    assert len(data["modules"]) > 20
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_what_cannot_be_asked_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "tp=3"]) == 2
    assert "cannot be split" in capsys.readouterr().err
    assert run(["verify", "tq=2"]) == 2
    assert "'tq=2' is not a valid part of a layout" in capsys.readouterr().err


def test_data_that_are_not_there_are_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    values = ["num_layers = 2", "hidden_size = 16", "num_attention_heads = 2", "vocab_size = 64"]
    file.write_text("\n".join(["[model]", *values, "[data]", 'train = ["nowhere"]']))

    assert run(["verify", "--config", str(file), "dp=1"]) == 2
    assert "nowhere.bin and nowhere.idx not found" in capsys.readouterr().err


def test_a_page_over_the_config_is_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    values = ["num_layers = 2", "hidden_size = 16", "num_attention_heads = 2", "vocab_size = 64"]
    text = "\n".join(["[model]", *values, "[data]", 'train = ["nowhere"]'])
    file.write_text(text)
    page = tmp_path / "page"
    page.symlink_to(file)

    assert run(["verify", "--config", str(file), "dp=1", "--html", str(page)]) == 2
    assert f"--html ({page}) would overwrite --config ({file})" in capsys.readouterr().err
    assert file.read_text() == text


def failing(error: BaseException) -> Callable[..., None]:
    def run_job(*_: Any, **__: Any) -> None:
        raise error

    return run_job


def reported(error: Exception) -> PoolError:
    """A pool's error for an exception on rank 1."""
    report = describe_failure(error, rank=1, phase="run")
    return PoolError(1, type(error).__name__, str(error), "Traceback", [report])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (reported(RuntimeError("it broke")), 3, "rank 1: RuntimeError: it broke"),
        (reported(PlatformError("no memory", ["use less"])), 2, "rank 1: no memory:\n  use less"),
        (
            PoolError(1, "Hang", "still running after 9 s", "in step"),
            3,
            "more with --timeout\nin step",
        ),
        (PoolError(1, "Death", "the process ended with exit code -9", ""), 3, "exit code -9"),
        (ZeroDivisionError("ours"), 3, "ours"),
    ],
    ids=["crash", "user error", "hang", "death", "in the command"],
)
def test_a_run_that_fails_is_no_divergence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(GlooPool, "start", lambda self, count: None)
    monkeypatch.setattr(GlooPool, "run", failing(error))
    assert run(["verify", "dp=2"]) == code
    printed = capsys.readouterr().err
    assert message in printed
    assert ("no verdict" in printed) is (code == 3)
    if isinstance(error, PoolError):
        assert "Traceback" not in printed


def test_a_refusal_imports_no_torch() -> None:
    code, modules = imported_by(["verify", "tp=3"])
    assert code == 2
    assert not {"torch", "megatron"} & {name.partition(".")[0] for name in modules}


def test_words_are_a_layout_or_settings() -> None:
    assert sorted_words(["tp=2", "model.num_layers=2", "sp"]) == (
        "tp=2,sp",
        ("model.num_layers=2",),
    )
    assert sorted_words([]) == (None, ())


def test_the_text_says_what_is_wrong_and_what_to_do() -> None:
    lines = [*text_of(VERDICT)]
    assert lines[:5] == [
        "verify a plugin on cp=2",
        "",
        "verdict: DIVERGES at decoder.layers.0.<mlp> (backward)",
        "why: its input",
        "shown by: gradients, against plain: x & y",
    ]
    assert lines[5].startswith("next: ")
    assert lines.index("a: not exercised: it did nothing; set a.b=1") > 5
    assert lines.index("note: a note") > 5


def test_the_table_has_relative_errors_and_tolerances() -> None:
    rows = [line.split() for line in text_of(VERDICT)]
    assert ["gradients", "plain", "WRONG", "inf", "1e-10", "a.weight"] in rows
    assert ["losses", "plain", "ok", "3.1e-07", "1e-05"] in rows


def test_a_check_without_anything_to_compare_is_a_dash() -> None:
    rows = [line.split() for line in text_of(VERDICT)]
    assert ["tied", "weights", "itself", "-"] in rows
    assert "<td>-</td>" in render(VERDICT)


def test_all_problems_are_listed_only_with_details() -> None:
    assert "second" not in "\n".join(text_of(VERDICT))
    assert "  second" in [*text_of(VERDICT, details=True)]


def test_the_page_is_whole_and_escapes() -> None:
    page = render(VERDICT)
    assert "decoder.layers.0.&lt;mlp&gt;" in page
    assert "x &amp; y" in page
    assert "a: not exercised" in page
    assert "<script" not in page
    assert page.count("<rect") == 3
    assert "src=" not in page.replace("style-src=", "")


def test_warnings_about_the_data_are_no_part_of_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warn = lambda prepared: print("a warning")  # noqa: E731
    monkeypatch.setattr("ascend_run.prepare.rank_start.check_run_data", warn)
    check_data(prepared=None)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "a warning\n")


def test_json_has_no_infinite_numbers() -> None:
    data = json.loads(json.dumps(VERDICT.as_data(), allow_nan=False))
    assert data["checks"][1]["worst"] is None
    assert data["fault"]["phase"] == "backward"
    assert data["outcome"] == "DIVERGES"
