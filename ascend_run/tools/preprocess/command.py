"""The command line of ``ascend-run preprocess``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_run.tools.preprocess.writing import PreprocessReport

_FORMATS = ("auto", "jsonl", "text", "python")


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
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json to use.")
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
@click.option("--workers", type=click.IntRange(min=1), help="Threads; default: one per core.")
@click.option("--overwrite", is_flag=True, help="Overwrite existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(as_json: bool, workers: int | None, **values: Any) -> None:
    """Tokenize text to Megatron's token files.

    Duplicates and empty documents are dropped. A text or Python file is one document, and so is a
    JSON line. Output is published only after all of it has been written.
    """
    if workers is not None:
        # Read once by the thread pool of tokenizers, at its first batch.
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    from ascend_run.tools.preprocess.options import PreprocessOptions
    from ascend_run.tools.preprocess.writing import preprocess
    from ascend_run.tools.terminal.byte_bars import byte_bars

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
    """The report as text."""
    megabytes = report.input_bytes / 1e6
    yield (
        f"read {report.files:,} files, {megabytes:,.1f} MB in {report.seconds:.1f} s "
        f"({megabytes / max(report.seconds, 1e-9):.1f} MB/s)"
    )
    yield f"dropped {report.duplicates:,} duplicates, {report.empty:,} empty documents"
    for path in report.undecodable:
        yield f"skipped, not decodable: {path}"
    yield (
        f"tokenizer {report.tokenizer}: {report.vocab_size:,} tokens, "
        f"fingerprint {report.tokenizer_sha256[:12]}"
    )
    for name, part in (("training", report.train), ("held out", report.heldout)):
        if part is not None:
            yield f"{name}: {part.documents:,} documents, {part.tokens:,} tokens in {part.prefix}"
