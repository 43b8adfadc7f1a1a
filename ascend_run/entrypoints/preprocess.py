"""``ascend-run preprocess``: text files to a tokenizer and token files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_run.core.data.preprocess import PreprocessReport

_FORMATS = ("auto", "jsonl", "text", "python")


@click.command("preprocess")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="A file or a folder; may be given several times.",
)
@click.option(
    "--output-prefix",
    required=True,
    type=click.Path(path_type=Path),
    help="Writes PREFIX.bin, PREFIX.idx and their record PREFIX.json.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json to use.")
@click.option(
    "--train-tokenizer",
    "train_vocab_size",
    type=int,
    metavar="VOCAB_SIZE",
    help="Train a byte-level BPE on the training part instead.",
)
@click.option(
    "--tokenizer-out",
    type=click.Path(path_type=Path),
    help="Where the trained one goes; default: tokenizer.json beside the output.",
)
@click.option("--end-token", help="The end-of-document token; default: the tokenizer's known one.")
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    default="auto",
    show_default=True,
    help="How files are read; auto goes by the suffix.",
)
@click.option(
    "--json-key", default="text", show_default=True, help="The field of a JSON line with the text."
)
@click.option(
    "--append-eod/--no-append-eod",
    default=True,
    show_default=True,
    help="End every document with the end-of-document token.",
)
@click.option(
    "--holdout",
    type=float,
    default=0.0,
    show_default=True,
    metavar="FRACTION",
    help="Hold out this fraction of the documents, chosen by their content.",
)
@click.option(
    "--heldout-prefix",
    type=click.Path(path_type=Path),
    help="Where they go; default: PREFIX-heldout.",
)
@click.option("--skip-undecodable", is_flag=True, help="Leave out files that are not UTF-8.")
@click.option("--workers", type=click.IntRange(min=1), help="Threads; default: one a core.")
@click.option("--overwrite", is_flag=True, help="Replace output that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(as_json: bool, workers: int | None, **values: Any) -> None:
    """Tokenise text into Megatron's token files.

    Copies and empty documents are dropped. A text or Python file is one document, a JSON line is
    one. Nothing is published unless all of it is written.
    """
    if workers is not None:
        # The tokenizers' thread pool reads it once, when its first batch comes.
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    from ascend_run.core.data.preprocess import PreprocessOptions, preprocess

    from .byte_bars import byte_bars

    options = PreprocessOptions(**values)
    with byte_bars() as progress:
        report = preprocess(options, progress)
    if as_json:
        import json

        import attrs

        click.echo(json.dumps(attrs.asdict(report), indent=2))
    else:
        for line in _lines(report):
            click.echo(line)


def _lines(report: PreprocessReport) -> Iterator[str]:
    """The report for people."""
    megabytes = report.input_bytes / 1e6
    yield (
        f"read {report.files:,} files, {megabytes:,.1f} MB in {report.seconds:.1f} s "
        f"({megabytes / max(report.seconds, 1e-9):.1f} MB/s)"
    )
    yield f"dropped {report.duplicates:,} duplicates, {report.empty:,} empty documents"
    for path in report.undecodable:
        yield f"left out, not decodable: {path}"
    yield (
        f"tokenizer {report.tokenizer}: {report.vocab_size:,} tokens, "
        f"fingerprint {report.tokenizer_sha256[:12]}"
    )
    for name, part in (("training", report.train), ("held out", report.heldout)):
        if part is not None:
            yield f"{name}: {part.documents:,} documents, {part.tokens:,} tokens in {part.prefix}"
