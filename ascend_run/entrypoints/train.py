"""``ascend-run train``, or no command at all: check a run, start its ranks, train.

Nothing starts before the whole run is known to be sound. The ranks come from torchrun, srun or
whatever else has set RANK and WORLD_SIZE; else as many are started as the user asks for, and one
alone runs in this very process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from .rank_start import check_run_data, set_environment
from .run_options import run_options

if TYPE_CHECKING:
    from ascend_run.core.config.raw import RawConfig
    from ascend_run.core.launch.options import LaunchOptions
    from ascend_run.core.launch.rank_environment import RankEnvironment

    from .planning import Prepared

_RANK_TARGET: Final = "ascend_run.entrypoints.train:run_rank"


@click.command("train")
@run_options
@click.option("--print-config", is_flag=True, help="Print the resolved settings as TOML, and end.")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Ranks to start on this node; default: run.nproc."
)
@click.option("--nnodes", type=click.IntRange(min=1), help="Nodes that run this command.")
@click.option("--node-rank", type=click.IntRange(min=0), help="This node's place among them.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the nodes meet.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start all ranks again this often after one has failed.",
)
def command(
    file: Path | None,
    enable: Sequence[str] | None,
    platform: str | None,
    task: str | None,
    overrides: Sequence[str],
    level: int | None,
    disable: Sequence[str],
    print_config: bool,
    nproc: int | None,
    nnodes: int | None,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    max_restarts: int,
) -> None:
    """Train, with the plugins that you name.

    A setting is SECTION.KEY=VALUE and counts over the file; --enable, --platform and --task count
    over the file too. --print-config shows where every value comes from.
    """
    from ascend_run.core.launch.options import LaunchOptions

    from .planning import prepare_raw

    if nproc is not None:
        overrides = [*overrides, f"run.nproc={nproc}"]
    request = {
        "file": None if file is None else str(file),
        "overrides": [*overrides],
        "enable": None if enable is None else [*enable],
        "platform": platform,
        "task": task,
        "level": level,
        "disable": [*disable],
    }
    raw = _raw_config(request)
    options = LaunchOptions(
        nproc=raw.nproc,
        nnodes=nnodes or 1,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
    )
    place = _place(os.environ, starts_own=nproc is not None or nnodes is not None)
    prepared = prepare_raw(raw, place.world_size if place else options.world_size)
    if print_config:
        _print_config(prepared)
        return
    check_run_data(prepared)
    too_late = set_environment(prepared, 1 if place else options.nproc)
    if place is not None:
        if too_late and place.rank == 0:
            _warn_too_late(too_late, place)
        _train_in_place(prepared, place)
        was_first = place.rank == 0
    elif options.world_size == 1 and not too_late:
        _train_alone(prepared)
        was_first = True
    else:
        was_first = _train_on_ranks(prepared, request, options)
    if was_first:
        _tell_outcome(prepared)


def run_rank(request: Mapping[str, Any]) -> None:
    """One rank that was started here: prepare the run again, and train."""
    from .planning import prepare_raw

    _train(prepare_raw(_raw_config(request), int(os.environ["WORLD_SIZE"])))


def _raw_config(request: Mapping[str, Any]) -> RawConfig:
    import attrs

    from ascend_run.core.config.raw import COMMAND_LINE
    from ascend_run.core.config.reading import read_raw

    file = None if request["file"] is None else Path(request["file"])
    chosen = {name: request[name] for name in ("enable", "platform", "task")}
    raw = read_raw(file, request["overrides"]).replacing(COMMAND_LINE, **chosen)
    return attrs.evolve(raw, level=request["level"], disable=tuple(request["disable"]))


def _place(environment: Mapping[str, str], starts_own: bool) -> RankEnvironment | None:
    """The place that a starter has given this process; None where ranks are started here.

    Raises:
        ConfigError: The user asks for ranks inside of a rank.
    """
    from ascend_run.core.launch.rank_environment import find_rank_environment
    from ascend_run.plugin_api.errors import ConfigError

    place = find_rank_environment(environment)
    if place is None or not starts_own:
        return place
    if place.starter == "SLURM":  # one task on each node, which starts the node's ranks
        return None
    raise ConfigError(
        f"this process is rank {place.rank} of {place.world_size} already, as {place.starter} in "
        "the environment say; leave out --nproc and --nnodes, or unset these variables"
    )


def _warn_too_late(names: Sequence[str], place: RankEnvironment) -> None:
    settings = " ".join(f"{name}={os.environ[name]}" for name in names)
    click.echo(
        f"warning: {', '.join(names)} had to be set before this process started; set it where "
        f"{place.starter} is started: {settings} ...",
        err=True,
    )


def _train_in_place(prepared: Prepared, place: RankEnvironment) -> None:
    from ascend_run.core.launch.failures import describe_failure, record_failure, summarize
    from ascend_run.plugin_api.errors import AscendRunError

    os.environ.update(place.variables())
    try:
        _train(prepared)
    except AscendRunError as error:
        record_failure(error, rank=place.rank)
        raise summarize([describe_failure(error, rank=place.rank, phase="run")]) from None
    except BaseException as error:
        record_failure(error, rank=place.rank)
        raise


def _train_alone(prepared: Prepared) -> None:
    from ascend_run.core.launch.alone import sigterm_unwinds

    with sigterm_unwinds():
        _train(prepared)


def _train_on_ranks(prepared: Prepared, request: Mapping[str, Any], options: LaunchOptions) -> bool:
    """Whether rank 0, which writes the run folder, was one of this node's."""
    from ascend_run.core.launch.agent import launch_ranks

    folder = Path(prepared.config.run.output_dir)

    def note_failure(why: str, lost_peer: bool) -> None:
        from ascend_run.core.log.metrics import add_failure
        from ascend_run.plugin_api.errors import AscendRunError

        # A node may not see the folder; why the run ended is reported in any case.
        if folder.is_dir():
            with suppress(AscendRunError):
                add_failure(folder / "metrics.jsonl", why, lost_peer=lost_peer)

    return launch_ranks(_RANK_TARGET, request, options, note_failure)


def _train(prepared: Prepared) -> None:
    with warnings.catch_warnings():
        # Megatron warns of each optional library that it does without; none is needed here.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from ascend_run.core.run import run_training

    run_training(prepared.run_request())


def _tell_outcome(prepared: Prepared) -> None:
    """Write the run's page, and say how the loss went and where the page is."""
    from .report import read_run, write_report
    from .report.command import as_text

    folder = Path(prepared.config.run.output_dir)
    target = folder / "report.html"
    click.echo(as_text(write_report([read_run(folder)], target), target))


def _print_config(prepared: Prepared) -> None:
    from ascend_run.core.config.printing import render_toml

    click.echo(render_toml(prepared.resolved), nl=False)
