"""The command line of ``ascend-run convert``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .target_options import megatron_options

if TYPE_CHECKING:
    from ascend_run.tools.convert.conversion import Converted
    from ascend_run.tools.convert.verifying.comparison import Comparison

_TARGETS = ("hf", "ascend-run", "mp-rank", "mp-rank-legacy", "torch-dist")
_SHOWN = 20
"""Differences that are listed."""
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
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step or iteration of the checkpoint; default: the newest.",
)
@click.option(
    "--family",
    metavar="NAME",
    help="Model family; default: from the run's config or the folder's config.json.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Config of the model: a run's config.toml, or a Hugging Face config.json; default: "
    "beside the checkpoint.",
)
@click.option(
    "--read-moe-tp-extend-ep",
    is_flag=True,
    help="SOURCE has whole experts on tensor-parallel ranks; default: as its args say.",
)
@click.option(
    "--first-copy",
    is_flag=True,
    help="Where copies of a replicated tensor differ, take the first rank's; default: an error.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Adapter in PEFT's format to merge into the weights.",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Hugging Face folder of the weights of a run's adapters; default: its model.hf_path.",
)
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
    step: int | None,
    family: str | None,
    file: Path | None,
    read_moe_tp_extend_ep: bool,
    first_copy: bool,
    adapter: Path | None,
    base: Path | None,
    verify: str | None,
    as_json: bool,
    source: Path,
    target: Path,
    **of_target: Any,
) -> int:
    """Convert a checkpoint to another format.

    \b
    ascend-run convert --to hf runs/demo exported
    ascend-run convert --to ascend-run /models/llama runs/llama
    ascend-run convert --to mp-rank --tp 2 --pp 4 /models/llama megatron

    The target must not exist or be empty. Values and dtypes are preserved.
    """
    if direction is not None:
        if target_format is not None or source_format is not None:
            raise click.UsageError("--to-hf and --from-hf stand for --to and --from: leave one")
        target_format = "hf" if direction == "to" else "ascend-run"
        source_format = None if direction == "to" else "hf"
    if target_format is None:
        raise click.UsageError("say which way: --to FORMAT, or --to-hf or --from-hf")
    if not target_format.startswith("mp-rank"):
        _require_unset(of_target, target_format)
    # Read by torch: huge pages for large tensors, which take fewer page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from ascend_run.launch.alone import sigterm_unwinds
    from ascend_run.tools.convert.conversion import Conversion, convert
    from ascend_run.tools.convert.opening import SourceOptions
    from ascend_run.tools.terminal.byte_bars import byte_bars

    asked = Conversion(
        source=source,
        source_format=source_format,
        options=SourceOptions(
            step=step,
            family=family,
            config=file,
            tp_extend_ep=read_moe_tp_extend_ep,
            first_copy=first_copy,
            adapter=adapter,
            base=base,
        ),
        target=target,
        target_format=target_format,
        layout=of_target,
        verify=verify,
    )
    try:
        with sigterm_unwinds(), byte_bars() as progress:
            done = convert(asked, progress)
    except SystemExit:  # from SIGTERM
        click.echo("terminated", err=True)
        raise
    return _report(target, done, as_json=as_json)


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


def _report(target: Path, done: Converted, *, as_json: bool) -> int:
    """Print what was written and compared; return the exit code."""
    model, comparison = done.model, done.comparison
    differs = comparison is not None and bool(comparison.different)
    if as_json:
        import json

        written: dict[str, object] = {
            "family": model.family.model_type,
            "folder": str(target),
            "step": model.step,
            "tensors": len(model.headers),
            "bytes": model.nbytes,
        }
        if model.num_merged:
            written["merged"] = model.num_merged
        if comparison is not None:
            written["verify"] = {
                "kind": comparison.kind,
                "equal": not differs,
                "compared": comparison.compared,
                "max_difference": None
                if differs and comparison.max_difference == float("inf")
                else comparison.max_difference,
                "different": dict(comparison.different),
            }
        click.echo(json.dumps(written, indent=2))
    elif not differs:
        click.echo(
            f"{target}: {model.family.model_type}, step {model.step}, {len(model.headers):,} "
            f"tensors, {model.nbytes / 1e6:,.1f} MB"
        )
        if model.num_merged:
            click.echo(f"adapters merged into {model.num_merged:,} tensors")
        if comparison is not None:
            click.echo(
                f"verified: {comparison.compared:,} {comparison.kind} equal, max difference 0"
            )
    if not differs:
        return 0
    assert comparison is not None
    if not as_json:
        click.echo("\n".join(_differences(comparison)))
    click.echo(
        f"error: the target differs from the source in {len(comparison.different):,} of "
        f"{comparison.compared:,} {comparison.kind}; it was removed"
        if comparison.kind == "tensors"
        else "error: the logits of the target differ from the source's; it was removed",
        err=True,
    )
    return 1


def _differences(comparison: Comparison) -> Iterator[str]:
    """Yield a table of the first differences."""
    from ascend_run.tools.terminal.tables import table

    rows = [*comparison.different.items()]
    yield from table((comparison.kind, "difference"), rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield f"and {len(rows) - _SHOWN:,} more"
