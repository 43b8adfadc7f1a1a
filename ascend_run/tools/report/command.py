"""The command line of ``ascend-run report``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ascend_run.tools.report.summary import Summary


@click.command("report")
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write; default: report.html in the run folder, or compare.html in the first.",
)
@click.option(
    "--open",
    "opens",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Open the page in a browser; auto: if there is a display.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the headline figures as JSON.")
def command(run_dirs: tuple[Path, ...], output: Path | None, opens: str, as_json: bool) -> None:
    """Write report.html for a finished, failed or running run.

    RUN_DIRS are run folders (run.output_dir); several are compared on one page.
    """
    from ascend_run.core.run_files import PAGE_NAME, RUN_FILES
    from ascend_run.text.file_collisions import NamedPath, refuse_collisions
    from ascend_run.tools.pages.run_folder import read_run
    from ascend_run.tools.report.page import write_report

    runs = [read_run(path) for path in run_dirs]
    target = output or run_dirs[0] / (PAGE_NAME if len(runs) == 1 else "compare.html")
    inputs = [
        NamedPath("a file of the run", path / name) for path in run_dirs for name in RUN_FILES
    ]
    refuse_collisions(inputs, [NamedPath("--output", target)])
    summaries = write_report(runs, target)
    click.echo(_as_json(run_dirs, summaries, target) if as_json else as_text(summaries, target))
    if opens == "yes" or (opens == "auto" and not as_json and _someone_looks()):
        click.launch(target.resolve().as_uri())


def as_text(summaries: Sequence[Summary], target: Path) -> str:
    """Return the loss of each run at the start and the end, its blend, and the page's path."""
    lines = [
        f"{s.loss.name} loss: {s.loss.start:.4f} -> {s.loss.end:.4f} ({s.loss.percent:.1f} %)"
        for s in summaries
        if s.loss is not None
    ]
    lines += [each.sentence() for summary in summaries for each in summary.blend]
    return "\n".join([*lines, f"report: {target}"])


def _as_json(run_dirs: Sequence[Path], summaries: Sequence[Summary], target: Path) -> str:
    import attrs

    from ascend_run.core.log.json_values import to_json

    runs = [
        {"run_dir": str(path), **attrs.asdict(summary)}
        for path, summary in zip(run_dirs, summaries, strict=True)
    ]
    return json.dumps(json.loads(to_json({"report": str(target), "runs": runs})), indent=2)


def _someone_looks() -> bool:
    """Whether stdout is a terminal on a machine with a display."""
    display = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return display and sys.stdout.isatty()
