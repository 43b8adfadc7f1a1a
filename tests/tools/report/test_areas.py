"""Stacked areas from a file of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api import ReportPanel
from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.report.areas import Areas, area_figure, areas_of


def line(step: int, seconds: float, phase: str = "forward", **values: Any) -> str:
    return json.dumps({"step": step, "seconds": seconds, "phase": phase, "values": values})


def drawn(folder: Path, lines: list[str], name: str = "found.jsonl") -> list[Areas]:
    (folder / "found.jsonl").write_text("\n".join(lines))
    run = RunData(name="run", path=folder)
    panel = ReportPanel(title="Found", metrics=(), unit="bytes", areas=name)
    return areas_of([attrs.evolve(run, plan=attrs.evolve(run.plan, panels=(panel,)))])


def test_lines_that_are_not_valid_are_left_out(tmp_path: Path) -> None:
    bad = [
        *("", "[]", '{"step": 1', line(1, 0.2), line(1, 0.2, a="x"), line(1, 0.2, a=-1)),
        line(1, 0.2, a=1).replace('"forward"', "7"),
        line(1, float("inf"), a=1),
    ]
    (areas,) = drawn(tmp_path, [line(1, 0.1, a=1, b=2), *bad, line(1, 0.3, b=4)])
    assert areas.names == ("a", "b")
    assert [(s.seconds, s.values) for s in areas.samples] == [(0.1, (1, 2)), (0.3, (0, 4))]


def test_a_later_attempt_supersedes_and_the_last_steps_are_drawn(tmp_path: Path) -> None:
    lines = [line(step, time, a=step) for step in range(1, 7) for time in (0.1, 0.2)]
    *_, last = found = drawn(tmp_path, [*lines, line(6, 0.0, a=9), line(6, 0.1, a=8)])
    assert [areas.title for areas in found] == [f"Found: step {step}" for step in range(3, 7)]
    assert [sample.values for sample in last.samples] == [(9,), (8,)]


def test_only_files_of_the_run_folder_are_read(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    lines = [line(1, 0.1, a=1)]
    assert len(drawn(inside, lines)) == 1
    (tmp_path / "found.jsonl").write_text(lines[0])
    assert drawn(inside, lines, "../found.jsonl") == []
    assert drawn(inside, lines, "missing.jsonl") == []


def test_a_reduced_drawing_has_the_highest_moment_of_each_phase(tmp_path: Path) -> None:
    lines = [line(1, i / 1000, a=2048 * (i == 3336), b=1024) for i in range(5000)]
    lines += [line(1, 6 + i, "<update>", a=512 * i, b=0) for i in range(2)]
    (areas,) = drawn(tmp_path, lines)
    text = area_figure(areas)
    assert "highest in forward: 3 KiB" in text
    assert "<td>512 B</td>" in text
    assert "<update>" not in text
    assert len(text) < 60_000
