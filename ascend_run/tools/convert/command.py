"""The command line of ``ascend-run convert``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ascend_run.tools.convert.formats.model_source import ModelSource

_SIZE = click.IntRange(min=1)
_TARGETS = ("hf", "ascend-run", "mp-rank", "mp-rank-legacy", "torch-dist")
_SOURCES = ("hf", "ascend-run", "mp-rank", "torch-dist")


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Comma-separated numbers from 0."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of numbers such as 7,8,8,9", param, ctx)
        return tuple(map(int, parts))


def _layout_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a target with ``mp_rank_*`` folders."""
    options = (
        click.option("--tp", type=_SIZE, default=1, help="Tensor-parallel size of the target."),
        click.option("--pp", type=_SIZE, default=1, help="Pipeline-parallel size."),
        click.option("--vpp", type=_SIZE, default=1, help="Chunks of layers per pipeline stage."),
        click.option("--ep", type=_SIZE, default=1, help="Expert-parallel size."),
        click.option(
            "--expert-tp", type=_SIZE, help="Tensor-parallel size of experts; default: --tp."
        ),
        click.option(
            "--tp-extend-ep",
            is_flag=True,
            help="Whole experts on tensor-parallel ranks (MindSpeed's moe-tp-extend-ep).",
        ),
        click.option(
            "--layer-list", type=_Numbers(), default=(), help="Layers of each stage: 7,8,8,9."
        ),
        click.option(
            "--empty-layers",
            type=_Numbers(),
            default=(),
            help="Layer slots that stay empty: 0,31 (MindSpeed's noop-layers).",
        ),
        click.option(
            "--grouped-matmul-layout",
            is_flag=True,
            help="Experts as weight1 and weight2 (MindSpeed's and Megatron's grouped matmul).",
        ),
        click.option(
            "--transformer-engine",
            is_flag=True,
            help="Names of Transformer Engine's modules; default: of Megatron's local ones.",
        ),
        click.option(
            "--make-vocab-size-divisible-by",
            type=_SIZE,
            metavar="N",
            help="Pad the vocabulary to a multiple of N times --tp; default: the model's.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


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
    "--read-tp-extend-ep",
    is_flag=True,
    help="SOURCE has whole experts on tensor-parallel ranks; default: as its args say.",
)
@_layout_options
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
    read_tp_extend_ep: bool,
    as_json: bool,
    source: Path,
    target: Path,
    **of_target: Any,
) -> None:
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
    from contextlib import ExitStack

    from ascend_run.tools.convert.formats.model_source import refuse_taken, require_outside
    from ascend_run.tools.convert.opening import Format, SourceOptions, open_model, recognised
    from ascend_run.tools.terminal.byte_bars import byte_bars

    refuse_taken(target)
    options = SourceOptions(step=step, family=family, config=file, tp_extend_ep=read_tp_extend_ep)
    with ExitStack() as stack, byte_bars() as progress:
        found = Format(source_format) if source_format else recognised(source, step)
        model = open_model(source, found, options, stack)
        require_outside(target, model.folder)
        _write(target, target_format, model, of_target, progress)
    _report(target, model, as_json=as_json)


def _require_unset(layout: dict[str, Any], target_format: str) -> None:
    """
    Raises:
        UsageError: An option of another format is given; names all.
    """
    allowed = {"transformer_engine"} if target_format == "torch-dist" else set()
    context = click.get_current_context()
    given = [
        "--" + name.replace("_", "-")
        for name in layout
        if name not in allowed
        and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: no effect with --to {target_format}")


def _write(
    target: Path,
    target_format: str,
    model: ModelSource,
    layout: dict[str, Any],
    progress: Callable[[str, int, int], None],
) -> None:
    if target_format == "hf":
        from ascend_run.tools.convert.exporting import export_hf

        export_hf(target, model.family, model.config, model.parameters(progress))
    elif target_format == "ascend-run":
        from ascend_run.tools.convert.formats.run_checkpoints import write_checkpoint

        write_checkpoint(target, model, progress)
    elif target_format == "torch-dist":
        from ascend_run.tools.convert.formats.torch_dist import write_torch_dist

        write_torch_dist(target, model, progress, engine=layout["transformer_engine"])
    else:
        from ascend_run.tools.convert.formats.mp_rank_writing import mp_rank_options, write_mp_rank

        legacy = target_format == "mp-rank-legacy"
        write_mp_rank(target, model, mp_rank_options(layout, legacy=legacy), progress)


def _report(target: Path, model: ModelSource, *, as_json: bool) -> None:
    if as_json:
        import json

        written = {
            "family": model.family.model_type,
            "folder": str(target),
            "step": model.step,
            "tensors": len(model.headers),
            "bytes": model.nbytes,
        }
        click.echo(json.dumps(written, indent=2))
        return
    click.echo(
        f"{target}: {model.family.model_type}, step {model.step}, {len(model.headers):,} tensors, "
        f"{model.nbytes / 1e6:,.1f} MB"
    )
