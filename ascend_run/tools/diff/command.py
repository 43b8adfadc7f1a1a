"""The command line of ``ascend-run diff``. Imports no torch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .rendering import Diff

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("diff")
@click.argument("run_a", type=_FOLDER)
@click.argument("run_b", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(run_a: Path, run_b: Path, as_json: bool) -> int:
    """Show the first step in which two runs differ, and possible causes.

    RUN_A and RUN_B are run folders (run.output_dir). The exit code is 0 if all common steps are
    bitwise equal, 1 if one differs.
    """
    from . import rendering

    diff = _diff(run_a, run_b)
    if as_json:
        import json

        from ascend_run.core.log.json_values import to_json

        click.echo(json.dumps(json.loads(to_json(rendering.as_json(diff))), indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(rendering.as_text(diff, width))
    return 0 if diff.steps.first is None else 1


def _diff(run_a: Path, run_b: Path) -> Diff:
    """
    Raises:
        DataError: One of them is not a run folder, or has no fingerprints to compare.
    """
    from ascend_run.tools.pages.fingerprint_file import read_fingerprints
    from ascend_run.tools.pages.run_differences import differences
    from ascend_run.tools.pages.run_folder import read_run
    from ascend_run.tools.pages.step_differences import compare_steps

    from .rendering import Diff

    runs = [read_run(path) for path in (run_a, run_b)]
    found = [read_fingerprints(path) for path in (run_a, run_b)]
    steps = compare_steps(found[0].entries, found[1].entries)
    return Diff(
        paths=(run_a, run_b),
        fingerprints=(found[0], found[1]),
        steps=steps,
        differences=differences(runs[0], runs[1], steps.first_data),
        problems=(
            (*runs[0].problems, *found[0].problems),
            (*runs[1].problems, *found[1].problems),
        ),
    )
