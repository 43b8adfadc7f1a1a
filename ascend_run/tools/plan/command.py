"""``ascend-run plan``: show what a run would do, without running it and without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from ascend_run.tools.terminal.run_options import run_options

if TYPE_CHECKING:
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.prepare.config.raw import RawConfig
    from ascend_run.prepare.prepare import PreparedRun


@click.command("plan")
@run_options
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks on each node; default: run.nproc.")
@click.option("--nnodes", type=click.IntRange(min=1), help="Nodes; default: 1.")
@click.option(
    "--world", type=click.IntRange(min=1), metavar="N", help="Total number of ranks on all nodes."
)
@click.option("--all", "everything", is_flag=True, help="Also show settings with default values.")
@click.option("--device", help="Estimate the step time on: ascend-910b, h100, h200, cpu, a file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in the format of plan.json.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write an HTML page with charts; it needs no network.",
)
@click.option("--build", is_flag=True, help="Also build the model on fake tensors; imports torch.")
def command(
    file: Path | None,
    enable: Sequence[str] | None,
    platform: str | None,
    task: str | None,
    overrides: Sequence[str],
    level: int | None,
    disable: Sequence[str],
    nproc: int | None,
    nnodes: int | None,
    world: int | None,
    everything: bool,
    device: str | None,
    as_json: bool,
    html: Path | None,
    build: bool,
) -> None:
    """Show what a run would do, without running it.

    Which plugin implements which hook, in which order and why; the layout of ranks; the estimated
    memory, communication and FLOPs of each rank; where each setting comes from. A run that cannot
    start fails with the same errors as in training.
    """
    from ascend_run.plugin_api.errors import AscendRunError
    from ascend_run.prepare.plan.json_values import plan_values
    from ascend_run.prepare.prepare import prepare_raw, request

    from .costs import with_costs

    if world is not None and (nproc is not None or nnodes is not None):
        raise click.UsageError("--world counts all ranks; leave out --nproc and --nnodes")
    own = [] if nproc is None else [f"run.nproc={nproc}"]
    raw = None
    try:
        raw = request(file, [*overrides, *own], enable, platform, task, level, disable)
        ranks = world or raw.nproc * (nnodes or 1)
        prepared = with_costs(prepare_raw(raw, ranks), device)
        if html is not None:
            _check_page_path(prepared, html, file, device)
        if build:
            _let_megatron_check(prepared)
        if html is not None:
            from .page import write_plan_page

            write_plan_page(prepared, html, named="the defaults" if file is None else file.name)
    except AscendRunError as error:
        if not as_json:
            raise
        click.echo(json.dumps(_refusal(error, raw, world, nnodes), indent=2))
        raise click.exceptions.Exit(error.exit_code) from None
    if as_json:
        click.echo(json.dumps(plan_values(prepared.plan), indent=2))
    elif html is not None:
        click.echo(f"plan: {html}")
    else:
        from .text import plan_lines

        click.echo("\n".join(plan_lines(prepared, everything)))


def _check_page_path(
    prepared: PreparedRun, html: Path, file: Path | None, device: str | None
) -> None:
    """
    Raises:
        ConfigError: The page would overwrite an input of the run.
    """
    from ascend_run.core.run_files import run_inputs
    from ascend_run.text.file_collisions import NamedPath, refuse_collisions

    given = [] if device is None else [NamedPath("--device", Path(device))]
    inputs = [*given, *run_inputs(prepared.config, file)]
    refuse_collisions(inputs, [NamedPath("--html", html)])


def _let_megatron_check(prepared: PreparedRun) -> None:
    """
    Raises:
        ConfigError: Megatron rejects the model.
    """
    import os
    import warnings

    # A torch_npu without its libraries would break the import of torch itself.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.simplefilter("ignore")
        from ascend_run.tools.plan.trial_build import trial_build

    trial_build(prepared.config, prepared.instances(), prepared.layout.world_size)


def _refusal(
    error: AscendRunError, raw: RawConfig | None, world: int | None, nnodes: int | None
) -> dict[str, object]:
    """The error of a request that cannot run, as JSON values.

    Args:
        raw: The request; None if it could not be read.
    """
    conflicts = [*getattr(error, "conflicts", ())]
    can_run = getattr(error, "can_run", ())
    if raw is not None and raw.level is None and not conflicts:
        from .incompatibilities import find_incompatibilities

        traced = find_incompatibilities(error, raw, world or raw.nproc * (nnodes or 1))
        conflicts = [attrs.asdict(conflict) for conflict in traced.found]
        can_run = traced.can_run
    return {
        "error": error.headline,
        "problems": [*error.problems] or [error.headline],
        "conflicts": [{**found, "plugins": [*found["plugins"]]} for found in conflicts],
        "can_run": [[*names] for names in can_run],
    }
