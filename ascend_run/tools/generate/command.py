"""The command line of ``ascend-run generate``. Imports no torch until it runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.source_options import SourceOptions, source_options

from .beam_options import BeamOptions, beam_options
from .model_options import ModelOptions, dtype_option, model_options, tokenizer_option
from .printing import TextPrinter, as_record
from .sampling_options import SamplingOptions, sampling_options


@click.command("generate")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with a prompt on each line; they are answered as one batch, in their order.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Longest answer; the model's longest text ends it too.",
)
@tokenizer_option
@source_options
@dtype_option
@sampling_options
@beam_options
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each prompt.")
def command(
    model: Path,
    prompt: str | None,
    file: Path | None,
    max_new_tokens: int,
    tokenizer: Path | None,
    dtype: str | None,
    as_json: bool,
    source_options: SourceOptions,
    sampling_options: SamplingOptions,
    beam_options: BeamOptions,
    model_options: ModelOptions,
) -> int:
    """Continue prompts with a stored model.

    \b
    ascend-run generate runs/demo "Once upon a time"
    ascend-run generate runs/demo "Once upon a time" --temperature 0.8 --top-p 0.95
    ascend-run generate /models/llama --prompts questions.txt --json

    MODEL is a run's folder or one of its checkpoints, or a folder of Hugging Face's or Megatron's
    format. The most probable token follows each time, unless an option draws it or searches.
    """
    prompts = _prompts(prompt, file)
    _require_sensible(sampling_options, beam_options, as_json, model_options.world_size)
    from .answering import Question, answers
    from .rank import ran_on_ranks

    started = time.perf_counter()
    sampling = sampling_options.sampling()
    question = Question(
        model=model,
        options=source_options,
        tokenizer=tokenizer,
        dtype=dtype,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        model_options=model_options,
        sampling=sampling,
        stop=sampling_options.stop,
        search=beam_options.search(sampling_options),
    )
    if ran_on_ranks(question):
        return 0
    printer = TextPrinter(prompts)
    new_tokens = 0
    for one in answers(question) if as_json else answers(question, printer.add):
        new_tokens += one.new_tokens
        if as_json:
            click.echo(as_record(one))
        else:
            printer.end()
    seed = f", seed {sampling.seed}" if sampling_options.draws else ""
    seconds = time.perf_counter() - started
    click.echo(f"{new_tokens} new tokens in {seconds:.1f} s{seed}", err=True)
    return 0


def _require_sensible(
    options: SamplingOptions, beams: BeamOptions, as_json: bool, num_ranks: int
) -> None:
    """
    Raises:
        ConfigError: An option is out of range or has no effect; lists all.
    """
    problems = [*options.problems(), *beams.problems(options)]
    if beams.num_beams > 1 and num_ranks > 1:
        problems.append(
            f"--num-beams {beams.num_beams} on {num_ranks} ranks: a search is on one rank only; "
            "leave out --tp, --pp, --ep and --nproc, or --num-beams"
        )
    if options.logprobs is not None and not as_json:
        problems.append("--logprobs: no effect without --json")
    if problems:
        raise ConfigError("these options cannot be used", problems)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    """
    Raises:
        UsageError: Neither a prompt nor a file is named, or both, or the file has none.
    """
    if prompt is not None:
        if file is not None:
            raise click.UsageError(
                f"both name what to continue: the PROMPT {prompt!r} and --prompts {file}; give one"
            )
        return [prompt]
    if file is None:
        raise click.UsageError("say what to continue: a PROMPT, or --prompts FILE")
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise click.UsageError(f"--prompts {file} cannot be read: {reason}") from None
    if not lines:
        raise click.UsageError(f"--prompts {file} has no line")
    return lines
