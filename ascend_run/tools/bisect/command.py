"""The command line of ``ascend-run bisect``. Imports torch only when it is needed."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ascend_run.tools.terminal.run_options import (
    compared_model_options,
    complete_feature_list,
    split_names,
)


@click.command("bisect")
@click.option(
    "--enable",
    multiple=True,
    metavar="NAME,NAME",
    callback=split_names,
    shell_complete=complete_feature_list,
    help="Feature plugins to search, instead of two runs.",
)
@compared_model_options
@click.option(
    "--timeout",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Limit of each compared run; default: as for verify.",
)
@click.option("--fresh", is_flag=True, help="Start over instead of continuing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.argument("words", nargs=-1, metavar="RUN_A RUN_B | [LAYOUT] [SECTION.KEY=VALUE]...")
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
    """Find what makes two runs part, or which plugins make a run diverge.

    RUN_A and RUN_B are run folders (run.output_dir). With --enable, LAYOUT and settings are as for
    verify. A search that was interrupted is continued by the same command in the same folder. Exit
    code 0: the runs do not diverge; 1: found; 2: invalid request; 3: a compared run failed.

    \b
    ascend-run bisect runs/before runs/after
    ascend-run bisect --enable gmm,swap-attention,distribute-saved tp=2,ep=2
    """
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.tools.verify.command import sorted_words
    from ascend_run.tools.verify.layouts import parse_layout
    from ascend_run.tools.verify.questions import Question
    from ascend_run.tools.verify.ranks import NoVerdict

    from .searching import Options, search_plugins, search_runs
    from .text import text_of

    options = Options(timeout=timeout, fresh=fresh)
    given = {"--config": file, "--model": model, "--platform": platform, "--task": task}
    try:
        if enable:
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
            result = search_plugins(question, options)
        else:
            result = search_runs(_folders(words, given), options)
    except (AscendRunError, click.ClickException):
        raise
    except Exception:
        # Python would exit with 1, which means that the run diverges.
        traceback.print_exc()
        click.echo("error: bisect itself failed", err=True)
        return NoVerdict.exit_code
    if as_json:
        click.echo(json.dumps(result.as_data(), indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(text_of(result, width)))
    return 0 if result.culprits is None else 1


def _folders(words: Sequence[str], given: Mapping[str, object]) -> tuple[Path, Path]:
    """
    Raises:
        UsageError: These are not two run folders and nothing else.
    """
    if len(words) != 2:
        got = " ".join(words) or "neither"
        raise click.UsageError(f"expected two run folders, or --enable with plugins; got {got}")
    if extra := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(
            f"{', '.join(extra)}: two runs are compared as their folders describe them; "
            "these options are for --enable"
        )
    return Path(words[0]), Path(words[1])
