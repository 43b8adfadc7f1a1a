"""The command line of ``ascend-run convert``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .source_options import SourceOptions, source_options
from .target_options import megatron_options

if TYPE_CHECKING:
    from ascend_run.tools.convert.conversion import Conversion

_TARGETS = ("hf", "ascend-run", "mp-rank", "mp-rank-legacy", "torch-dist", "peft")
_SOURCES = ("hf", "ascend-run", "mp-rank", "torch-dist")


@click.command("convert")
@click.option("--to", "target_format", type=click.Choice(_TARGETS), help="Format to write.")
@click.option(
    "--from",
    "source_format",
    type=click.Choice(_SOURCES),
    help="Format of SOURCE; default: recognised by its files.",
)
@click.option("--to-hf", "direction", flag_value="to", help="The same as --to hf.")
@click.option(
    "--from-hf", "direction", flag_value="from", help="The same as --from hf --to ascend-run."
)
@source_options
@click.option(
    "--verify",
    type=click.Choice(("tensors", "logits")),
    help="Compare the files written with the source, before they get their name.",
)
@megatron_options
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def command(
    target_format: str | None,
    source_format: str | None,
    direction: str | None,
    verify: str | None,
    as_json: bool,
    source: Path,
    target: Path,
    source_options: SourceOptions,
    **of_target: Any,
) -> int:
    """Convert a checkpoint to another format.

    \b
    ascend-run convert --to hf runs/demo exported
    ascend-run convert --to ascend-run /models/llama runs/llama
    ascend-run convert --to mp-rank --tp 2 --pp 4 /models/llama megatron
    ascend-run convert --to peft runs/tuned adapter

    The target must not exist or be empty. Values and dtypes are preserved.
    """
    source_format, target_format = _formats(direction, source_format, target_format)
    if not target_format.startswith("mp-rank"):
        _require_unset(of_target, target_format)
    if target_format == "peft":
        _require_plain(source_options.adapter, verify)
    from ascend_run.tools.convert.conversion import Conversion

    request = Conversion(
        source=source,
        source_format=source_format,
        options=source_options,
        target=target,
        target_format=target_format,
        layout=of_target,
        verify=verify,
    )
    return _run(request, as_json)


def _run(request: Conversion, as_json: bool) -> int:
    """Convert and print what was done; return the exit code."""
    # Read by torch: huge pages for large tensors, which take fewer page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from ascend_run.launch.alone import sigterm_unwinds
    from ascend_run.tools.convert.conversion import convert
    from ascend_run.tools.convert.reporting import as_record, as_text, difference_message
    from ascend_run.tools.terminal.byte_bars import byte_bars

    try:
        with sigterm_unwinds(), byte_bars() as progress:
            done = convert(request, progress)
    except SystemExit:  # from SIGTERM
        click.echo("terminated", err=True)
        raise
    if as_json:
        click.echo(as_record(request.target, done))
    else:
        click.echo(as_text(request.target, done))
    if problem := difference_message(done):
        click.echo(f"error: {problem}", err=True)
        return 1
    return 0


def _formats(
    direction: str | None, source_format: str | None, target_format: str | None
) -> tuple[str | None, str]:
    """
    Raises:
        UsageError: No target is named, or two.
    """
    if direction is not None:
        if target_format is not None or source_format is not None:
            raise click.UsageError("--to-hf and --from-hf stand for --to and --from: leave one")
        return (None, "hf") if direction == "to" else ("hf", "ascend-run")
    if target_format is None:
        raise click.UsageError("say which way: --to FORMAT, or --to-hf or --from-hf")
    return source_format, target_format


def _require_plain(adapter: Path | None, verify: str | None) -> None:
    """
    Raises:
        UsageError: An option is given that needs weights, which an adapter does not have.
    """
    if adapter is not None:
        raise click.UsageError("--adapter: no effect with --to peft, which merges nothing")
    if verify == "logits":
        raise click.UsageError("--verify logits needs weights; with --to peft say --verify tensors")


def _require_unset(layout: dict[str, Any], target_format: str) -> None:
    """
    Raises:
        UsageError: An option of another format is given; names all.
    """
    allowed = {"transformer_impl"} if target_format == "torch-dist" else set()
    context = click.get_current_context()
    given = [
        "--" + name.replace("_", "-")
        for name in layout
        if name not in allowed
        and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: no effect with --to {target_format}")
