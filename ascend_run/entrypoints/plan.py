"""``ascend-run plan``: what a run would be, before anything runs and without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from .run_options import run_options

if TYPE_CHECKING:
    from ascend_run.core.config.raw import RawConfig
    from ascend_run.plugin_api.errors import AscendRunError

    from .planning import Prepared


@click.command("plan")
@run_options
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks on each node; default: run.nproc.")
@click.option("--nnodes", type=click.IntRange(min=1), help="Nodes; default: 1.")
@click.option(
    "--world", type=click.IntRange(min=1), metavar="N", help="Ranks in all, wherever they are."
)
@click.option(
    "--all", "everything", is_flag=True, help="Show the values that are defaults as well."
)
@click.option("--device", help="Estimate the step's time on: ascend-910b, h100, h200, cpu, a file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as plan.json has it.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with pictures; it needs no network.",
)
@click.option("--build", is_flag=True, help="Also let Megatron check the model; imports torch.")
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
    """Show what a run would be, before anything runs.

    Which plugin implements which hook, in which order and why; the layout of ranks; what each
    rank is expected to hold, send and compute; where each setting comes from. What cannot run is
    refused as training would refuse it.
    """
    from ascend_run.plugin_api.errors import AscendRunError

    from .plan_costs import on_device
    from .planning import prepare_raw, request

    if world is not None and (nproc is not None or nnodes is not None):
        raise click.UsageError("--world counts all ranks; leave out --nproc and --nnodes")
    own = [] if nproc is None else [f"run.nproc={nproc}"]
    raw = None
    try:
        raw = request(file, [*overrides, *own], enable, platform, task, level, disable)
        ranks = world or raw.nproc * (nnodes or 1)
        prepared = on_device(prepare_raw(raw, ranks), device)
        if build:
            _let_megatron_check(prepared)
        if html is not None:
            from .plan_page import write_plan_page

            write_plan_page(prepared, html, named="the defaults" if file is None else file.name)
    except AscendRunError as error:
        if not as_json:
            raise
        click.echo(json.dumps(_refusal(error, raw, world, nnodes), indent=2))
        raise click.exceptions.Exit(error.exit_code) from None
    if as_json:
        click.echo(json.dumps(prepared.plan, indent=2))
    elif html is not None:
        click.echo(f"plan: {html}")
    else:
        from .plan_text import plan_lines

        click.echo("\n".join(plan_lines(prepared, everything)))


def _let_megatron_check(prepared: Prepared) -> None:
    """
    Raises:
        ConfigError: Megatron refuses the model.
    """
    import os
    import warnings

    # A torch_npu without its libraries would break the import of torch itself.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with warnings.catch_warnings():
        # Megatron warns of each optional library that it does without; none is needed here.
        warnings.simplefilter("ignore")
        from ascend_run.core.model.trial_build import trial_build

    trial_build(prepared.config, prepared.instances(), prepared.layout.world_size)


def _refusal(
    error: AscendRunError, raw: RawConfig | None, world: int | None, nnodes: int | None
) -> dict[str, object]:
    """What a refused request comes to, as JSON values.

    Args:
        raw: The request; None where it could not be read.
    """
    conflicts = [*getattr(error, "conflicts", ())]
    can_run = getattr(error, "can_run", ())
    if raw is not None and raw.level is None and not conflicts:
        from .misfits import misfits

        traced = misfits(error, raw, world or raw.nproc * (nnodes or 1))
        conflicts = [attrs.asdict(conflict) for conflict in traced.found]
        can_run = traced.can_run
    return {
        "error": error.headline,
        "problems": [*error.problems] or [error.headline],
        "conflicts": [{**found, "plugins": [*found["plugins"]]} for found in conflicts],
        "can_run": [[*names] for names in can_run],
    }
