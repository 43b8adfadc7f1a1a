"""Run training on one rank, from the resolved config and plugins to the last step.

An entry point passes in what the registry resolved; this module imports neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch.distributed as dist

from ascend_run.plugin_api import contracts as c
from ascend_run.types.config import RunConfig

from .checkpoint import GroupRanks
from .config.layout import layout_of
from .data.batches import BatchPlan
from .data.index_cache import IndexCache
from .environment import environment_of
from .equal_plugins import require_equal_plugins
from .fingerprint.reading import RowHashes
from .folder import write_environment, write_run_folder
from .hooks import Hooks
from .log.setup import configure_logging
from .patches import applied_patches
from .rank.rank_environment import RankEnvironment
from .recorder import Recorder, RunRecorder
from .run_end import notifying_listeners, recording_failure
from .run_files import CONFIG_NAME
from .settings import process_settings
from .train.checkpointing import Checkpoints
from .train.data import open_batches
from .train.fingerprints import StepFingerprints
from .train.groups import process_groups
from .train.loop import Loop
from .train.models import build_models, release_graphs
from .train.phases import phase_scope
from .train.readings import Readings
from .train.seeding import seed_everything
from .train.steps import TrainSteps

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from ascend_run.plugin_api.manifest import EnabledPlugin


@attrs.frozen(kw_only=True)
class RunRequest:
    """Input of :func:`run_training`, built by an entry point."""

    config: RunConfig
    config_toml: str
    """The resolved config as TOML. A run started from it is identical."""
    plugins: Sequence[EnabledPlugin]
    """Plugin instances in resolved order, innermost first."""
    idle: Mapping[str, str]
    """Maps each plugin that has no effect in this run to the condition that disables it."""
    lock: Mapping[str, object]
    """Maps each plugin to its distribution, version and hash; must be equal on all ranks."""
    comm_options: Mapping[str, c.CommOptions] = attrs.field(factory=dict)
    """Name of a process group -> options of its communicator; must be equal on all ranks."""
    plan_json: str = ""
    """Text of ``plan.json``; only rank 0 needs it, which writes the run folder."""


@contextmanager
def prepared_rank(request: RunRequest) -> Iterator[tuple[Hooks, c.RunContext]]:
    """Set up the device, patches, process settings and process groups of this rank.

    Yields the hooks and a context that holds no models yet. Everything is undone on exit.
    """
    process = RankEnvironment.of_this_process()
    hooks = Hooks(request.plugins)
    device = hooks.require("ascend_device", local_rank=process.local_rank)
    layout = layout_of(request.config, process.world_size, process.rank)
    device.activate()
    try:
        with (
            applied_patches(hooks),
            process_settings(request.config, hooks),
            process_groups(request.config, layout, device, hooks, request.comm_options) as groups,
        ):
            require_equal_plugins(request.lock, GroupRanks(device=device.torch_device))
            context = c.RunContext(
                config=request.config,
                layout=layout,
                device=device,
                groups=groups,
                cache=IndexCache.of_run(request.config),
            )
            try:
                yield hooks, context
            finally:
                release_graphs(context)
    finally:
        device.deactivate()


def run_training(request: RunRequest) -> None:
    """Train to the last step. Must be called on every rank.

    Raises:
        AscendRunError: An error that the user can fix. Checkpoints saved before it stay intact.
    """
    folder = Path(request.config.run.output_dir)
    with prepared_rank(request) as (hooks, context):
        is_writer = context.layout.rank == 0
        # What a run has written stays as it is until this one has resumed from it.
        is_new = not (folder / CONFIG_NAME).exists()
        if is_writer and is_new:
            _write_request(request, folder)
        dist.barrier()
        metrics = folder / "metrics.jsonl" if is_writer else None
        with (
            configure_logging(folder / "log.jsonl", context.layout.rank) as log,
            recording_failure(metrics, log.logger),
        ):
            log_plugins(request, log.logger)
            # On every rank: ranks may choose together. A plugin that measures logs the result.
            choices = hooks.merge("ascend_machine_choices", config=request.config)
            environment = (
                environment_of(request.config, context.device, choices) if is_writer else {}
            )
            if is_writer and is_new:
                write_environment(folder, environment)
            _train(request, hooks, context, folder, log.logger, environment)


def _write_request(request: RunRequest, folder: Path) -> None:
    write_run_folder(
        folder, config_toml=request.config_toml, plan_json=request.plan_json, lock=request.lock
    )


def log_plugins(request: RunRequest, log: FilteringBoundLogger) -> None:
    """Log the enabled plugins, innermost first, and warn about each plugin that has no effect."""
    for order, plugin in enumerate(request.plugins):
        log.info("plugin.enabled", plugin=plugin.manifest.name, order=order)
    for name, condition in request.idle.items():
        log.warning("plugin.idle", plugin=name, changes_nothing_as=condition)


def _train(
    request: RunRequest,
    hooks: Hooks,
    context: c.RunContext,
    folder: Path,
    log: FilteringBoundLogger,
    environment: Mapping[str, Any],
) -> None:
    config = request.config
    with notifying_listeners(hooks, context, log):
        task: c.Task = hooks.require("ascend_task", config=config)
        plan = BatchPlan.of_rank(config, context.layout)
        seed_everything(config, context.layout)
        build_models(task, hooks, context, plan.num_microbatches)
        checkpoints = Checkpoints(hooks, context, folder)
        with phase_scope(hooks, context, c.RunPhase.CHECKPOINT)():
            checkpoints.restore(log)
        if context.layout.rank == 0:
            _write_request(request, folder)
            write_environment(folder, environment)
        with _recorder(context, folder, log) as recorder:
            loop = _build_loop(hooks, context, task, plan, recorder, checkpoints, log)
            hooks.event("ascend_before_run")(context=context)
            loop.run()


def _recorder(context: c.RunContext, folder: Path, log: FilteringBoundLogger) -> Recorder:
    if context.layout.rank != 0:
        return Recorder()
    total = context.config.train.train_iters
    return RunRecorder(folder, start=context.step, total=total, log=log)


def _build_loop(
    hooks: Hooks,
    context: c.RunContext,
    task: c.Task,
    plan: BatchPlan,
    recorder: Recorder,
    checkpoints: Checkpoints,
    log: FilteringBoundLogger,
) -> Loop:
    step = TrainSteps(context, task, hooks)
    is_first_replica = not any(context.layout.coordinate(axis) for axis in ("tp", "cp", "pp"))
    rows = RowHashes(plan, owns=is_first_replica)
    fingerprints = StepFingerprints(context, step.bundle, log, rows)
    batches = open_batches(task, hooks, context, plan, rows)
    saves = context.config.checkpoint.save_interval > 0
    return Loop(
        context=context,
        step=step,
        readings=Readings(context, step, hooks),
        fingerprints=fingerprints,
        recorder=recorder,
        hooks=hooks,
        train_batches=batches.train,
        validation_batches=batches.validation,
        num_microbatches=plan.num_microbatches,
        last_step=context.config.train.train_iters,
        save=(lambda: checkpoints.save(fingerprints.latest)) if saves else None,
    )
