"""``ascend-run verify``: does the run compute what it should? Torch comes once it must."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_run.entrypoints.run_options import (
    complete_feature_list,
    complete_platform,
    complete_task,
    split_names,
)

if TYPE_CHECKING:
    from ascend_run.core.verify.verdict import Verdict

    from .verifier import Tell


@click.command("verify")
@click.option(
    "--enable",
    multiple=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Feature plugins under test; none tests the layout.",
)
@click.option(
    "--beside",
    multiple=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Features that are enabled in the reference of the same layout too.",
)
@click.option("--against", metavar="LAYOUT", help="One more layout to compare with.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Your model and batches, in place of a tiny built-in model.",
)
@click.option(
    "--model", type=click.Choice(["dense", "moe"]), help="Built-in model; default: as needed."
)
@click.option("--platform", metavar="NAME", shell_complete=complete_platform, help="Device.")
@click.option("--task", metavar="NAME", shell_complete=complete_task, help="What to train.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with every check and the modules drawn.",
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
    as_json: bool,
    html: Path | None,
    words: Sequence[str],
) -> int:
    """Compare a run with the same run without its plugins, and with one rank.

    LAYOUT is tp=2,cp=2,sp and the like (tp, pp, vpp, cp, ep, expt_tp, dp, sp). Loss, every
    gradient, weights after some steps, replicas, tied weights and random streams are compared.
    Exit code 0: bitwise, or within what the plugins declare; 1: DIVERGES; 2: cannot be asked;
    3: no verdict, as a run failed.

    \b
    ascend-run verify --enable ulysses cp=2
    ascend-run verify tp=2,ep=2
    """
    from ascend_run.plugin_api.errors import AscendRunError

    from .ranks import NoVerdict
    from .table import text_of

    layout, overrides = _sorted_words(words)
    asked: dict[str, Any] = {
        "enable": tuple(enable),
        "beside": tuple(beside),
        "model": model,
        "file": None if file is None else str(file),
        "overrides": overrides,
        "platform": platform,
        "task": task,
    }
    try:
        verdict = _answer(layout, against, asked)
        text = json.dumps(verdict.as_data(), indent=2) if as_json else "\n".join(text_of(verdict))
    except AscendRunError:
        raise
    except Exception:
        # Python's own code for it is 1, which is that of a run that diverges.
        traceback.print_exc()
        click.echo("error: no verdict, as verify itself failed", err=True)
        return NoVerdict.exit_code
    click.echo(text)
    if html is not None:
        from .page import write_page

        write_page(verdict, html)
        click.echo(f"page: {html}", err=as_json)
    return 0 if verdict.good else 1


def _answer(layout: str | None, against: str | None, asked: Mapping[str, Any]) -> Verdict:
    from .layouts import parse_layout
    from .questions import Question
    from .ranks import LaunchedRanks
    from .sides import sides_of
    from .verifier import Verifier

    question = Question(
        layout=None if layout is None else parse_layout(layout),
        against=None if against is None else parse_layout(against),
        **asked,
    )
    if question.file is not None:
        from ascend_run.entrypoints.rank_start import check_run_data

        check_run_data(sides_of(question).candidate.prepare())
    with _progress() as tell:
        return Verifier(LaunchedRanks(), tell)(question)


def _sorted_words(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The layout, whose parts may stand apart, and the settings, whose keys have a dot."""
    overrides = [word for word in words if "." in word.partition("=")[0]]
    layout = [word for word in words if word not in overrides]
    return ",".join(layout) or None, tuple(overrides)


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on a terminal; elsewhere nothing, as the runs take seconds."""
    import sys

    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True
    ) as bar:
        task = bar.add_task("verify", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell
