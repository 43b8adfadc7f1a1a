"""The command line of ``ascend-run chat``. Imports no torch until it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ascend_run.tools.convert.source_options import SourceOptions, source_options
from ascend_run.tools.generate.model_options import (
    dtype_option,
    rope_length_option,
    template_option,
    tokenizer_option,
)
from ascend_run.tools.generate.sampling_options import SamplingOptions, sampling_options


@click.command("chat")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--system", metavar="TEXT", help="System message, before all turns.")
@click.option(
    "--history-turns",
    type=click.IntRange(min=0),
    metavar="N",
    help="Earlier turns that the model gets with a message; default: as many as fit into its "
    "longest text.",
)
@click.option(
    "--tools",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON list of functions that the model may call, in the form of OpenAI's API.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Longest answer; the model's longest text ends it too.",
)
@tokenizer_option
@template_option
@source_options
@dtype_option
@rope_length_option
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens that the key-value cache has room for, and so a conversation; default: as many as "
    "the model's longest text has, and at most half of the free memory.",
)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each message.")
def command(
    model: Path,
    as_json: bool,
    source_options: SourceOptions,
    sampling_options: SamplingOptions,
    **given: Any,
) -> int:
    """Talk to a stored model.

    \b
    ascend-run chat runs/demo
    ascend-run chat /models/llama --system "Be brief." --temperature 0.7
    ascend-run chat /models/qwen --tools functions.json

    MODEL is what generate takes. Each line is a message; the standard input may be a pipe. /help
    lists what else a line may say.
    """
    problems = []
    if sampling_options.logprobs is not None and not as_json:
        problems.append("--logprobs: no effect without --json")
    from .lines import entries, noted_interrupts, reader
    from .opening import ChatQuestion, opened, prepared
    from .printing import JsonPrinter, TextPrinter, note
    from .repl import Repl

    question = ChatQuestion(model=model, options=source_options, sampling=sampling_options, **given)
    known = prepared(question, problems)
    is_terminal = sys.stdin.isatty()
    with opened(question, known) as chat:
        if known.chat.template is None:
            note(f"each line continues the text as it is typed: {known.chat.no_template}")
        if sampling_options.draws and sampling_options.seed is None:
            note(f"seed {chat.seed}")
        if is_terminal:
            note("/help lists commands")
        repl = Repl(
            chat=chat,
            printer=JsonPrinter(known.chat.texts) if as_json else TextPrinter(),
            interrupts=noted_interrupts if is_terminal else _none,
            has_template=known.chat.template is not None,
        )
        repl.run(entries(reader()))
    return 2 if repl.num_refused and not is_terminal else 0


@contextlib.contextmanager
def _none() -> Iterator[Callable[[], bool]]:
    """Of a pipe: an interrupt ends the command."""
    yield lambda: False
