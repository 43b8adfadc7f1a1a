"""``ascend-run verify``: check the results of a run. Imports torch only when it is needed."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from ascend_run.tools.terminal.run_options import (
    compared_model_options,
    complete_feature_list,
    split_names,
)

if TYPE_CHECKING:
    from ascend_run.prepare.prepare import PreparedRun
    from ascend_run.tools.verify.compare.verdict import Verdict

BUILT_IN_SECONDS: Final = 300.0
"""Limit of one run of the built-in model, which takes seconds."""
FILE_SECONDS: Final = 3600.0
"""Limit of one run of the user's model."""


@click.command("verify")
@click.option(
    "--enable",
    multiple=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Feature plugins to verify; without any, the layout is verified.",
)
@click.option(
    "--beside",
    multiple=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Features that are also enabled in the reference run of the same layout.",
)
@click.option("--against", metavar="LAYOUT", help="Another layout to compare with.")
@compared_model_options
@click.option(
    "--resume",
    is_flag=True,
    help="Also stop and resume the run, and compare it with the run without a stop.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Also verify layouts of three and four ranks, fp16, and both built-in models.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help=(
        "Limit of each compared run, after which a hang is reported; default: "
        f"{BUILT_IN_SECONDS:g}, with --config {FILE_SECONDS:g}."
    ),
)
@click.option("--details", is_flag=True, help="List the tensors and numbers that differ.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with all checks and a chart of the modules.",
)
@click.argument("words", nargs=-1, metavar="[LAYOUT] [SECTION.KEY=VALUE]...")
def command(
    enable: Sequence[str],
    beside: Sequence[str],
    against: str | None,
    file: Path | None,
    model: str | None,
    platform: str | None,
    task: str | None,
    resume: bool,
    thorough: bool,
    timeout: float | None,
    details: bool,
    as_json: bool,
    html: Path | None,
    words: Sequence[str],
) -> int:
    """Compare a run with the same run without its plugins, and with one rank.

    LAYOUT is, for example, tp=2,cp=2,sp (axes: tp, pp, vpp, cp, ep, expt_tp, dp, sp). Loss, all
    gradients, weights after some steps, replicas, tied weights and random number generators are
    compared. Exit code 0: bitwise equal, or within the declared numerics; 1: DIVERGES; 2: invalid
    request; 3: no verdict, because a run failed.

    \b
    ascend-run verify --enable ulysses cp=2
    ascend-run verify tp=2,ep=2
    """
    from ascend_run.plugin_api.errors import AscendRunError

    from .ranks import NoVerdict

    layout, overrides = sorted_words(words)
    options: dict[str, object] = {
        "enable": tuple(enable),
        "beside": tuple(beside),
        "model": model,
        "file": None if file is None else str(file),
        "overrides": overrides,
        "platform": platform,
        "task": task,
        "resume": resume,
    }
    try:
        verdict = _verify(layout, against, options, html, timeout, thorough=thorough)
        text = _text(verdict, as_json=as_json, details=details)
    except AscendRunError:
        raise
    except Exception:
        # Python would exit with 1, which means that the run diverges.
        traceback.print_exc()
        click.echo("error: no verdict, because verify itself failed", err=True)
        return NoVerdict.exit_code
    click.echo(text)
    if html is not None:
        from .page import write_page

        write_page(verdict, html)
        click.echo(f"page: {html}", err=as_json)
    return verdict.exit_code


def _text(verdict: Verdict, *, as_json: bool, details: bool) -> str:
    from .table import text_of

    if as_json:
        return json.dumps(verdict.as_data(), indent=2)
    return "\n".join(text_of(verdict, details=details))


def _verify(
    layout: str | None,
    against: str | None,
    options: Mapping[str, Any],
    html: Path | None,
    timeout: float | None,
    *,
    thorough: bool,
) -> Verdict:
    from ascend_run.launch.alone import sigterm_unwinds

    from .layouts import parse_layout
    from .progress import progress
    from .questions import Question
    from .shared_ranks import SharedRanks
    from .sides import sides_of
    from .thorough import note_on, verify_thoroughly
    from .verifier import Verifier

    question = Question(
        layout=None if layout is None else parse_layout(layout),
        against=None if against is None else parse_layout(against),
        **options,
    )
    if question.file is not None:
        from ascend_run.core.run_files import run_inputs
        from ascend_run.text.file_collisions import NamedPath, refuse_collisions

        prepared = sides_of(question).candidate.prepare()
        if html is not None:
            inputs = run_inputs(prepared.config, Path(question.file))
            refuse_collisions(inputs, [NamedPath("--html", html)])
        check_data(prepared)
    timeout = timeout or (BUILT_IN_SECONDS if question.file is None else FILE_SECONDS)
    with sigterm_unwinds(), SharedRanks(timeout) as ranks, progress() as report:
        verifier = Verifier(ranks, report)
        if thorough:
            return verify_thoroughly(verifier, question)
        verdict, note = verifier(question), note_on(question)
        return verdict if note is None else attrs.evolve(verdict, notes=(*verdict.notes, note))


def check_data(prepared: PreparedRun) -> None:
    """Check the token files; warnings about them are no part of the result on stdout."""
    from ascend_run.prepare.rank_start import check_run_data

    with redirect_stdout(sys.stderr):
        check_run_data(prepared)


def sorted_words(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The layout, which may be split over several words, and the settings, whose keys have a
    dot."""
    overrides = [word for word in words if "." in word.partition("=")[0]]
    layout = [word for word in words if word not in overrides]
    return ",".join(layout) or None, tuple(overrides)
