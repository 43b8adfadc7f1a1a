"""The command line of ``ascend-run evaluate``. Imports no torch until it runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ascend_run.tools.convert.source_options import SourceOptions, source_options
from ascend_run.tools.generate.model_options import dtype_option, tokenizer_option

from .checkpoint_options import CheckpointChoice, checkpoint_options
from .data_options import DataChoice, data_options
from .printing import lines_of
from .progress import progress_bars
from .results import Results
from .task_options import Asking, task_options

if TYPE_CHECKING:
    from .each_checkpoint import EachCheckpoint
    from .evaluating import Evaluation

_NOTHING: Final = "say what to evaluate: MODEL and DATA, --task NAME=PATH or --lm-eval NAME"


@click.command("evaluate")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.argument("data", nargs=-1)
@data_options
@task_options
@checkpoint_options
@tokenizer_option
@source_options
@dtype_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="New folder for results.json and results.html, a page with each question and its answer.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A B",
    help="Compare two folders written by --output, instead of evaluating a model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    model: Path | None,
    data: tuple[str, ...],
    tokenizer: Path | None,
    dtype: str | None,
    output: Path | None,
    compare: tuple[Path, Path] | None,
    as_json: bool,
    source_options: SourceOptions,
    reading: DataChoice,
    tasks: tuple[str, ...],
    asking: Asking,
    checkpoints: CheckpointChoice,
) -> int:
    """Measure perplexity and benchmarks of a stored model.

    \b
    ascend-run evaluate runs/demo data/heldout.jsonl
    ascend-run evaluate /models/llama book.txt data/demo/valid --window 1024 --stride 512 --json
    ascend-run evaluate runs/demo --task mmlu=data/mmlu --task gsm8k=data/gsm8k --output mine
    ascend-run evaluate runs/demo data/heldout.jsonl --follow
    ascend-run evaluate runs/demo --lm-eval my_task --lm-eval-tasks my-tasks
    ascend-run evaluate --compare mine other

    MODEL is a run's folder or one of its checkpoints, or a folder of Hugging Face's or Megatron's
    format. DATA are files or folders of text, or token files by their prefix, as data.train names
    them.
    """
    named = bool(tasks or asking.lm_eval)
    if compare is not None:
        if model is not None or named or output is not None:
            raise click.UsageError("--compare goes with neither MODEL, a task nor --output")
        return _compare(*compare, as_json=as_json)
    if model is None or not (data or named):
        raise click.UsageError(_NOTHING)
    _require_sensible(checkpoints, source_options, output)
    from .evaluating import Evaluation, evaluated
    from .storing import require_new

    if output is not None:
        require_new(output)
    asked = Evaluation(
        model=model,
        options=source_options,
        tokenizer=tokenizer,
        dtype=dtype,
        data=data,
        reading=reading.options(),
        windows=reading.windows(),
        tasks=tasks,
        asking=asking.options(),
        harness=asking.harness(),
    )
    if checkpoints.is_given:
        return _evaluate_each(asked, checkpoints.each(), as_json=as_json)
    with progress_bars() as progress:
        results = evaluated(asked, progress)
    return _report(results, output, as_json=as_json)


def _report(results: Results, output: Path | None, *, as_json: bool) -> int:
    from .storing import write_results

    if output is not None:
        write_results(results, output, written=time.time())
    click.echo(json.dumps(results.record()) if as_json else "\n".join(lines_of(results)))
    return 0


def _require_sensible(
    checkpoints: CheckpointChoice, options: SourceOptions, output: Path | None
) -> None:
    """
    Raises:
        UsageError: Options of several checkpoints and of one are mixed.
    """
    if not checkpoints.is_given:
        if checkpoints.name is not None:
            raise click.UsageError("--name goes with --every or --follow")
        return
    others = {"--step": options.step, "--config": options.config, "--output": output}
    if given := [option for option, value in others.items() if value is not None]:
        raise click.UsageError(
            f"--every and --follow evaluate the checkpoints of a run, with its config, and write "
            f"to its folder; leave out {', '.join(given)}"
        )


def _evaluate_each(asked: Evaluation, each: EachCheckpoint, *, as_json: bool) -> int:
    """Evaluate the checkpoints of a run, and print the results of each."""
    from .each_checkpoint import evaluate_each

    with progress_bars() as progress:
        for one in evaluate_each(asked, each, progress):
            if one.results is None:
                click.echo(f"step {one.step}: removed before it was evaluated", err=True)
            elif as_json:
                click.echo(json.dumps({"step": one.step, **one.results.record()}))
            else:
                click.echo("\n".join([f"step {one.step}", *lines_of(one.results), ""]))
    return 0


def _compare(a: Path, b: Path, *, as_json: bool) -> int:
    """Print what changed from A to B."""
    from .comparing import compared
    from .storing import read_results

    found = compared(read_results(a), read_results(b))
    click.echo(json.dumps(found.record()) if as_json else "\n".join(found.lines()))
    return 0
