"""The command line of ``ascend-run preprocess``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_run.tools.preprocess.report import PreprocessReport
    from ascend_run.tools.preprocess.sample_report import SampleReport

_FORMATS = ("auto", "jsonl", "records", "text", "python")


@click.command("preprocess")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="File or folder to read; may be repeated.",
)
@click.option(
    "--output-prefix",
    required=True,
    type=click.Path(path_type=Path),
    help="Write PREFIX.bin, PREFIX.idx and the metadata file PREFIX.json.",
)
@click.option(
    "--handler",
    default="text",
    show_default=True,
    help="Data handler of the records; other than text, token files have one pair a field.",
)
@click.option(
    "--map-keys",
    multiple=True,
    metavar="KEY=NAME",
    help="Name of a handler's key in the files, or a JSON object of names; may be repeated.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="A tokenizer.json or a SentencePiece .model; for conversations, the folder of the model's "
    "tokenizer.",
)
@click.option("--template", help="Chat template: a name or a .jinja file.")
@click.option("--date", help="Date for a chat template that requests today's.")
@click.option(
    "--special-tokens",
    type=click.Choice(("drop", "keep")),
    help="Drop (default) or keep samples whose text contains a special token.",
)
@click.option(
    "--equal-answers",
    type=click.Choice(("refuse", "drop")),
    help="Refuse (default) files with pairs whose answers are the same tokens, or drop such pairs.",
)
@click.option("--train-on-inputs", is_flag=True, help="Train every token of conversations.")
@click.option("--mask-history", is_flag=True, help="Train the assistant's last turn only.")
@click.option("--placeholder-token", help="Token after each step, for process rewards.")
@click.option(
    "--reward-tokens", multiple=True, metavar="TOKEN", help="Token of a rating; may be repeated."
)
@click.option(
    "--train-tokenizer",
    "train_vocab_size",
    type=int,
    metavar="VOCAB_SIZE",
    help="Train a byte-level BPE tokenizer of this size on the training documents instead.",
)
@click.option(
    "--tokenizer-out",
    type=click.Path(path_type=Path),
    help="File for the trained tokenizer; default: tokenizer.json next to the output.",
)
@click.option("--end-token", help="End-of-document token; default: the tokenizer's, if known.")
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    default="auto",
    show_default=True,
    help="Format of the files; auto: by suffix.",
)
@click.option(
    "--json-key", default="text", show_default=True, help="Key of the text in a JSON line."
)
@click.option(
    "--append-eod/--no-append-eod",
    default=True,
    show_default=True,
    help="Append the end-of-document token to every document.",
)
@click.option(
    "--holdout",
    type=float,
    default=0.0,
    show_default=True,
    metavar="FRACTION",
    help="Hold out this fraction of the documents, selected by a hash of their content.",
)
@click.option(
    "--heldout-prefix",
    type=click.Path(path_type=Path),
    help="Prefix for held-out documents; default: PREFIX-heldout.",
)
@click.option("--skip-undecodable", is_flag=True, help="Skip files that are not UTF-8.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Processes; default: one per core, fewer for little input.",
)
@click.option("--overwrite", is_flag=True, help="Overwrite existing output.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with counts, lengths, and what was left out and why.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(as_json: bool, workers: int | None, **values: Any) -> None:
    """Tokenize text, conversations and other samples to Megatron's token files.

    Of plain text, duplicates and empty documents are dropped. A text or Python file is one
    document, and so is a record of any other file. Output is published only after all of it has
    been written.
    """
    if workers is not None:
        # Read once by the thread pool of tokenizers, at its first batch.
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    values["workers"] = workers or len(os.sched_getaffinity(0))
    report: PreprocessReport | SampleReport
    if values["handler"] == "text":
        report = _preprocess_text(values)
    else:
        report = _preprocess_samples(values)
    if as_json:
        import json

        import attrs

        click.echo(json.dumps(attrs.asdict(report), indent=2))
    else:
        for line in report.lines():
            click.echo(line)


_OF_SAMPLES = (
    *("handler", "template", "date", "special_tokens", "equal_answers"),
    *("train_on_inputs", "mask_history", "placeholder_token", "reward_tokens"),
)
_OF_ALL = ("inputs", "output_prefix", "tokenizer", "map_keys", "workers", "overwrite", "report")


def _preprocess_text(values: dict[str, Any]) -> PreprocessReport:
    from ascend_run.plugin_api import ConfigError
    from ascend_run.text.handlers.loading import key_mapping, load_handler
    from ascend_run.tools.preprocess.options import PreprocessOptions
    from ascend_run.tools.preprocess.writing import preprocess
    from ascend_run.tools.terminal.byte_bars import byte_bars

    _refuse(values, _OF_SAMPLES[1:], "--handler text")
    keys = key_mapping(load_handler("text"), values["map_keys"])
    if keys and values["json_key"] != "text":
        raise ConfigError("--json-key and --map-keys name the same key; leave out one of the two")
    given = {k: v for k, v in values.items() if k not in (*_OF_SAMPLES, "map_keys")}
    options = PreprocessOptions(**given | {"json_key": keys.get("text", values["json_key"])})
    with byte_bars() as progress:
        return preprocess(options, progress)


def _preprocess_samples(values: dict[str, Any]) -> SampleReport:
    from ascend_run.tools.preprocess.samples import SampleOptions, preprocess_samples

    used = (*_OF_SAMPLES, *_OF_ALL)
    _refuse(values, [name for name in values if name not in used], f"--handler {values['handler']}")
    given = {name: values[name] for name in used}
    defaults = {"special_tokens": "drop", "equal_answers": "refuse"}
    return preprocess_samples(
        SampleOptions(**given | {name: values[name] or value for name, value in defaults.items()})
    )


def _refuse(values: dict[str, Any], names: Sequence[str], handler: str) -> None:
    """Refuse options that were given and have no effect with a handler."""
    from ascend_run.plugin_api import ConfigError

    defaults = {option.name: option for option in command.params}
    context = click.get_current_context()
    given = [
        defaults[name].opts[0]
        for name in names
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise ConfigError(
            "cannot preprocess",
            [f"{name} has no effect with {handler}; leave it out" for name in given],
        )
