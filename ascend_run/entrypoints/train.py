"""``ascend-run train``, the default command: check a run, start its ranks, train.

The whole run is checked before anything starts. Ranks are started by torchrun, srun or another
launcher that sets RANK and WORLD_SIZE; otherwise they are started here, and a single rank runs in
this process.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ascend_run.prepare.rank_start import check_run_data, set_environment
from ascend_run.tools.terminal.run_options import run_options

if TYPE_CHECKING:
    from ascend_run.core.rank.rank_environment import RankEnvironment
    from ascend_run.core.run import RunRequest
    from ascend_run.launch.options import LaunchOptions
    from ascend_run.prepare.config.raw import RawConfig
    from ascend_run.prepare.prepare import PreparedRun, ResolvedRun

_RANK_TARGET: Final = "ascend_run.entrypoints.train:run_rank"
_OTHERS_WAIT_SECONDS: Final = 5.0
"""How long the other ranks of a node wait for the first one to report an error."""


@click.command("train")
@run_options
@click.option("--print-config", is_flag=True, help="Print the resolved config as TOML and exit.")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Ranks to start on this node; default: run.nproc."
)
@click.option("--nnodes", type=click.IntRange(min=1), help="Nodes that run this command.")
@click.option("--node-rank", type=click.IntRange(min=0), help="Rank of this node.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Rendezvous endpoint of the nodes.")
@click.option(
    "--rdzv-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the shared secret of the nodes.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to restart all ranks after a failure.",
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
    rdzv_key_file: Path | None,
    max_restarts: int,
) -> None:
    """Train, with the plugins that you name.

    A setting is SECTION.KEY=VALUE. Settings, --enable, --platform and --task override the config
    file. --print-config shows where each value comes from.
    """
    from ascend_run.launch.options import LaunchOptions
    from ascend_run.prepare.prepare import prepare_raw, request
    from ascend_run.tools.plan.costs import with_costs

    if nproc is not None:
        overrides = [*overrides, f"run.nproc={nproc}"]
    read = partial(request, file, overrides, enable, platform, task, level, disable)
    launched = _launched_rank(os.environ, starts_own=nproc is not None or nnodes is not None)
    if launched is not None and not print_config:
        _train_launched(read, launched)
        return
    raw = read()
    options = LaunchOptions(
        nproc=raw.nproc,
        nnodes=nnodes or 1,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_key_file=rdzv_key_file,
        max_restarts=max_restarts,
    )
    prepared = prepare_raw(raw, launched.world_size if launched else options.world_size)
    if print_config:
        _print_config(prepared)
        return
    check_run_data(prepared)
    too_late = set_environment(prepared, options.nproc)
    if options.world_size > 1 or too_late:
        has_rank_0 = _train_on_ranks(with_costs(prepared), options)
    else:
        _train_alone(with_costs(prepared))
        has_rank_0 = True
    if has_rank_0:
        _report(prepared)


def run_rank(message: Mapping[str, Any]) -> None:
    """Run one rank that our launcher has started, with the run that the launcher has prepared."""
    from ascend_run.prepare.handed_over import HandedOver

    _train(HandedOver(**message).run_request)


def _launched_rank(environment: Mapping[str, str], starts_own: bool) -> RankEnvironment | None:
    """The rank that another launcher gave this process; None if ranks are started here.

    Raises:
        ConfigError: The user asks to start ranks inside of a rank.
    """
    from ascend_run.core.rank.rank_environment import find_rank_environment
    from ascend_run.plugin_api.errors import ConfigError

    launched = find_rank_environment(environment)
    if launched is None or not starts_own:
        return launched
    if launched.starter == "SLURM":  # one task per node, which starts the node's ranks
        return None
    raise ConfigError(
        f"this process is already rank {launched.rank} of {launched.world_size}, according to "
        f"{launched.starter} in the environment; leave out --nproc and --nnodes, or unset these "
        "variables"
    )


def _warn_too_late(names: Sequence[str], launched: RankEnvironment) -> None:
    settings = " ".join(f"{name}={os.environ[name]}" for name in names)
    click.echo(
        f"warning: {', '.join(names)} had to be set before this process started; set it where "
        f"{launched.starter} is started: {settings} ...",
        err=True,
    )


def _train_launched(read: Callable[[], RawConfig], launched: RankEnvironment) -> None:
    """Train as a rank that another launcher started.

    Each rank prepares itself. What rank 0 prepares could reach the others only through torch, and
    plugins set environment variables that torch reads when it is imported.
    """
    from ascend_run.prepare.prepare import prepare_rank, prepare_raw
    from ascend_run.tools.plan.comm_options import with_comm_options
    from ascend_run.tools.plan.costs import with_costs

    is_writer = launched.rank == 0
    with _reported_once(launched):
        prepared: ResolvedRun
        if is_writer:
            prepared = with_costs(prepare_raw(read(), launched.world_size))
        else:
            prepared = with_comm_options(prepare_rank(read(), launched.world_size))
        check_run_data(prepared)
        too_late = set_environment(prepared, 1)
    if is_writer and too_late:
        _warn_too_late(too_late, launched)
    _train_as_rank(prepared, launched)
    if is_writer:
        _report(prepared)


@contextmanager
def _reported_once(launched: RankEnvironment) -> Iterator[None]:
    """Report an error of preparation in full on the first rank of each node only.

    The other ranks wait, since torchrun ends all ranks when one has ended. Ranks that are not ended
    then report one line each.
    """
    from ascend_run.launch.failures import RankRefusal
    from ascend_run.plugin_api.errors import AscendRunError

    try:
        yield
    except AscendRunError as error:
        if launched.local_rank == 0:
            raise
        time.sleep(_OTHERS_WAIT_SECONDS)
        raise RankRefusal(f"rank {launched.rank}: {error.headline}") from None


def _train_as_rank(prepared: ResolvedRun, launched: RankEnvironment) -> None:
    from ascend_run.core.rank.failures import describe_failure, record_failure
    from ascend_run.launch.failures import summarize
    from ascend_run.plugin_api.errors import AscendRunError

    os.environ.update(launched.variables())
    try:
        _train(prepared.run_request)
    except AscendRunError as error:
        record_failure(error, rank=launched.rank)
        raise summarize([describe_failure(error, rank=launched.rank, phase="run")]) from None
    except BaseException as error:
        record_failure(error, rank=launched.rank)
        raise


def _train_alone(prepared: PreparedRun) -> None:
    from ascend_run.launch.alone import sigterm_unwinds

    with sigterm_unwinds():
        _train(prepared.run_request)


def _train_on_ranks(prepared: PreparedRun, options: LaunchOptions) -> bool:
    """Train on ranks started here; return whether rank 0, which writes the run folder, is on this
    node."""
    from ascend_run.launch.agent import launch_ranks
    from ascend_run.prepare.handed_over import HandedOver

    folder = Path(prepared.config.run.output_dir)

    def note_failure(why: str, lost_peer: bool) -> None:
        from ascend_run.core.log.metrics import add_failure
        from ascend_run.plugin_api.errors import AscendRunError

        # The folder may not be visible on this node; the failure is reported in any case.
        if folder.is_dir():
            with suppress(AscendRunError):
                add_failure(folder / "metrics.jsonl", why, lost_peer=lost_peer)

    return launch_ranks(_RANK_TARGET, HandedOver.of(prepared).as_json(), options, note_failure)


def _train(make_request: Callable[[], RunRequest]) -> None:
    with warnings.catch_warnings():
        # Megatron warns of each missing optional library; none is needed here.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from ascend_run.core.run import run_training

    run_training(make_request())


def _report(prepared: ResolvedRun) -> None:
    """Write the run's page; print a summary of the loss and the path of the page."""
    from ascend_run.core.run_files import PAGE_NAME
    from ascend_run.tools.pages.run_folder import read_run
    from ascend_run.tools.report.command import as_text
    from ascend_run.tools.report.page import write_report

    folder = Path(prepared.config.run.output_dir)
    target = folder / PAGE_NAME
    click.echo(as_text(write_report([read_run(folder)], target), target))


def _print_config(prepared: ResolvedRun) -> None:
    from ascend_run.prepare.config.printing import render_toml

    click.echo(render_toml(prepared.resolved), nl=False)
