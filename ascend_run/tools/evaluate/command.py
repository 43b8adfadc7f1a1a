"""The command line of ``ascend-run evaluate``. Imports no torch until it runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from ascend_run.tools.convert.source_options import SourceOptions, source_options
from ascend_run.tools.generate.model_options import dtype_option, tokenizer_option

from .printing import lines_of
from .progress import progress_bars
from .task_options import Asking, task_options


@click.command("evaluate")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.argument("data", nargs=-1)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most tokens before a predicted one; default: the model's longest text.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Predicted tokens of each window but the first; default: the window.",
)
@click.option(
    "--format",
    type=click.Choice(("auto", "jsonl", "records", "text", "python")),
    default="auto",
    show_default=True,
    help="Format of the files of text; auto: by suffix.",
)
@click.option(
    "--json-key", default="text", show_default=True, help="Key of the text in a JSON record."
)
@click.option(
    "--append-eod/--no-append-eod",
    default=True,
    show_default=True,
    help="Append the end-of-document token to every document.",
)
@task_options
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
    window: int | None,
    stride: int | None,
    format: str,
    json_key: str,
    append_eod: bool,
    tokenizer: Path | None,
    dtype: str | None,
    output: Path | None,
    compare: tuple[Path, Path] | None,
    as_json: bool,
    source_options: SourceOptions,
    tasks: tuple[str, ...],
    asking: Asking,
) -> int:
    """Measure perplexity and benchmarks of a stored model.

    \b
    ascend-run evaluate runs/demo data/heldout.jsonl
    ascend-run evaluate /models/llama book.txt data/demo/valid --window 1024 --stride 512 --json
    ascend-run evaluate runs/demo --task mmlu=data/mmlu --task gsm8k=data/gsm8k --output mine
    ascend-run evaluate --compare mine other

    MODEL is a run's folder or one of its checkpoints, or a folder of Hugging Face's or Megatron's
    format. DATA are files or folders of text, or token files by their prefix, as data.train names
    them.
    """
    if compare is not None:
        if model is not None or tasks or output is not None:
            raise click.UsageError("--compare goes with neither MODEL, --task nor --output")
        return _compare(*compare, as_json=as_json)
    if model is None or not (data or tasks):
        raise click.UsageError("say what to evaluate: MODEL and DATA, or --task NAME=PATH")
    from .evaluating import Evaluation, evaluated
    from .perplexity import WindowOptions
    from .storing import require_new, write_results
    from .token_streams import DataOptions

    if output is not None:
        require_new(output)
    asked = Evaluation(
        model=model,
        options=source_options,
        tokenizer=tokenizer,
        dtype=dtype,
        data=data,
        reading=DataOptions(format=format, key=json_key, append_eod=append_eod),
        windows=WindowOptions(window=window, stride=stride),
        tasks=tasks,
        asking=asking.options(),
    )
    with progress_bars() as progress:
        results = evaluated(asked, progress)
    if output is not None:
        write_results(results, output, written=time.time())
    click.echo(json.dumps(results.record()) if as_json else "\n".join(lines_of(results)))
    return 0


def _compare(a: Path, b: Path, *, as_json: bool) -> int:
    """Print what changed from A to B."""
    from .comparing import compared
    from .storing import read_results

    found = compared(read_results(a), read_results(b))
    click.echo(json.dumps(found.record()) if as_json else "\n".join(found.lines()))
    return 0
