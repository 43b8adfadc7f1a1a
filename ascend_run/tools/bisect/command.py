"""The command line of ``ascend-run bisect``. Imports torch only when it is needed."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_run.tools.terminal.run_options import (
    complete_feature_list,
    complete_platform,
    complete_task,
    split_names,
)

if TYPE_CHECKING:
    from ascend_run.tools.verify.questions import Question

    from .bisection import Bisection


@click.command("bisect")
@click.option(
    "--enable",
    multiple=True,
    required=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Feature plugins to search.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Config file with your model and data; default: a tiny built-in model.",
)
@click.option(
    "--model", type=click.Choice(["dense", "moe"]), help="Built-in model; default: as needed."
)
@click.option("--platform", metavar="NAME", shell_complete=complete_platform, help="Device.")
@click.option("--task", metavar="NAME", shell_complete=complete_task, help="What to train.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Limit of each compared run; default: as for verify.",
)
@click.option("--fresh", is_flag=True, help="Start over instead of continuing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("words", nargs=-1, metavar="[LAYOUT] [SECTION.KEY=VALUE]...")
def command(
    enable: Sequence[str],
    file: Path | None,
    model: str | None,
    platform: str | None,
    task: str | None,
    timeout: float | None,
    fresh: bool,
    as_json: bool,
    words: Sequence[str],
) -> int:
    """Find the plugins that make a run diverge.

    LAYOUT and settings are as for verify. A search that was interrupted is continued by the same
    command in the same folder. Exit code 0: the run does not diverge; 1: found; 2: invalid request;
    3: a compared run failed.

    \b
    ascend-run bisect --enable gmm,swap-attention,distribute-saved tp=2,ep=2
    """
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.tools.verify.command import sorted_words
    from ascend_run.tools.verify.layouts import parse_layout
    from ascend_run.tools.verify.questions import Question
    from ascend_run.tools.verify.ranks import NoVerdict

    from .text import text_of

    layout, overrides = sorted_words(words)
    question = Question(
        enable=tuple(dict.fromkeys(enable)),
        layout=None if layout is None else parse_layout(layout),
        model=model,
        file=None if file is None else str(file),
        overrides=overrides,
        platform=platform,
        task=task,
    )
    try:
        result = _bisect(question, timeout, fresh=fresh)
    except AscendRunError:
        raise
    except Exception:
        # Python would exit with 1, which means that the run diverges.
        traceback.print_exc()
        click.echo("error: bisect itself failed", err=True)
        return NoVerdict.exit_code
    if as_json:
        click.echo(json.dumps(result.as_data(), indent=2))
    else:
        click.echo("\n".join(text_of(result)))
    return 0 if result.culprits is None else 1


def _bisect(question: Question, timeout: float | None, *, fresh: bool) -> Bisection:
    from ascend_run.launch.alone import sigterm_unwinds
    from ascend_run.prepare.rank_start import check_run_data
    from ascend_run.tools.verify.command import BUILT_IN_SECONDS, FILE_SECONDS
    from ascend_run.tools.verify.shared_ranks import SharedRanks

    from .bisection import bisect
    from .comparing import Comparer
    from .journal import Journal

    timeout = timeout or (BUILT_IN_SECONDS if question.file is None else FILE_SECONDS)
    begin = time.monotonic()

    def report(number: int, enabled: str) -> None:
        seconds = time.monotonic() - begin
        print(f"bisect: {seconds:6.1f} s, {number}: {enabled}", file=sys.stderr, flush=True)

    with sigterm_unwinds(), SharedRanks(timeout) as ranks:
        compare = Comparer(question, ranks)
        if question.file is not None:
            check_run_data(compare.prepared)
        journal = Journal(Path.cwd(), compare.identity())
        if fresh:
            journal.remove()
        elif journal.path.exists():
            click.echo(f"bisect: continues {journal.path.name} (--fresh starts over)", err=True)
        return bisect(compare, journal, report)
