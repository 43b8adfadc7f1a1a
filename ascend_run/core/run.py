"""One run on one rank, from the resolved config and the plugins to the last step.

An entry point hands over what the registry resolved; this module knows neither.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.layout import Layout

from .agreement import require_equal_plugins
from .checkpoint import GroupRanks
from .config.layout import layout_of
from .data.batches import BatchPlan
from .data.samples import build_datasets
from .environment import environment_of
from .fingerprint.reading import RowHashes
from .folder import write_run_folder
from .hooks import Hooks
from .launch.rank_environment import RankEnvironment
from .log.setup import configure_logging
from .outcome import told_to_listeners
from .patches import applied_patches
from .recorder import RunRecorder, SilentRecorder
from .settings import process_settings
from .train.batches import BatchReader
from .train.checkpointing import Checkpoints
from .train.fingerprints import StepFingerprints
from .train.groups import process_groups
from .train.loop import Loop
from .train.models import build_models
from .train.readings import Readings
from .train.step import TrainStep

_SEEDS_OF_A_STAGE = 2**20
"""Megatron adds 100 for each expert-parallel rank and less for the others. With its own 100 for
each pipeline stage too, one stage's experts would draw what the next one's neighbours draw."""


@attrs.frozen(kw_only=True)
class RunRequest:
    """What an entry point asks of core."""

    config: RunConfig
    config_toml: str
    """The resolved config as a file that runs identically."""
    plugins: Sequence[Any]
    """Instances in resolved order, innermost first."""
    plan: Mapping[str, Any]
    lock: Mapping[str, Any]
    """Plugin -> distribution, version and hash; compared over all ranks."""


@contextmanager
def prepared_rank(request: RunRequest) -> Iterator[tuple[Hooks, c.RunContext]]:
    """This rank's device, patches, settings and process groups, and a context without models; all
    undone."""
    place = RankEnvironment.of_this_process()
    hooks = Hooks(request.plugins)
    device = hooks.require("ascend_device", local_rank=place.local_rank)
    layout = layout_of(request.config, place.world_size, place.rank)
    device.activate()
    try:
        with (
            applied_patches(hooks),
            process_settings(request.config, hooks),
            process_groups(request.config, layout, device, hooks) as groups,
        ):
            require_equal_plugins(request.lock, GroupRanks(device=device.torch_device))
            context = c.RunContext(
                config=request.config, layout=layout, device=device, groups=groups
            )
            try:
                yield hooks, context
            finally:
                _release_graphs(context)
    finally:
        device.deactivate()


def _release_graphs(context: c.RunContext) -> None:
    """Let go of the last micro-batch, so that models and their groups can be freed.

    Megatron's token dispatcher keeps the router's probabilities. From them a path leads through
    the autograd graph and the hooks of gradient reduction back to the dispatcher: a cycle through
    C++, which Python's collector cannot see.
    """
    for bundle in context.models.values():
        for chunk in bundle.chunks:
            for module in chunk.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if hasattr(dispatcher, "probs"):
                    dispatcher.probs = None


def run_training(request: RunRequest) -> None:
    """Train to the last step; called on every rank.

    Raises:
        AscendRunError: The user can mend it; whatever it was, nothing saved before is lost.
    """
    folder = Path(request.config.run.output_dir)
    with prepared_rank(request) as (hooks, context):
        writes = context.layout.rank == 0
        if writes:
            write_run_folder(
                folder,
                config_toml=request.config_toml,
                plan=request.plan,
                lock=request.lock,
                environment=environment_of(request.config, context.device),
            )
        dist.barrier()
        with configure_logging(folder / "log.jsonl", context.layout.rank) as log:
            log_plugins(request, log.logger)
            _train(request, hooks, context, folder, log.logger)


def log_plugins(request: RunRequest, log: Any) -> None:
    """Which plugins are enabled, innermost first, and a warning for each that changes nothing."""
    for order, plugin in enumerate(request.plugins):
        log.info("plugin.enabled", plugin=plugin.manifest.name, order=order)
    for name, condition in request.plan.get("idle", {}).items():
        log.warning("plugin.idle", plugin=name, changes_nothing_as=condition)


def _train(
    request: RunRequest, hooks: Hooks, context: c.RunContext, folder: Path, log: Any
) -> None:
    config = request.config
    with told_to_listeners(hooks, context, log):
        task: c.Task = hooks.require("ascend_task", config=config)
        plan = BatchPlan.of_rank(config, context.layout)
        seed_everything(config, context.layout)
        build_models(task, hooks, context, plan.num_micro_batches)
        checkpoints = Checkpoints(hooks, context, folder)
        checkpoints.restore(log)
        with _recorder(context, folder, log) as recorder:
            loop = _build_loop(hooks, context, task, plan, recorder, checkpoints, log)
            hooks.event("ascend_before_run")(context=context)
            loop.run()


def _recorder(context: c.RunContext, folder: Path, log: Any) -> RunRecorder | SilentRecorder:
    if context.layout.rank != 0:
        return SilentRecorder()
    total = context.config.train.train_iters
    return RunRecorder(folder, start=context.step, total=total, log=log)


def seed_everything(config: RunConfig, layout: Layout) -> None:
    """One seed for every generator; ranks that hold different parts of a model draw apart."""
    seed = config.run.seed + _SEEDS_OF_A_STAGE * layout.coordinate("pp")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _build_loop(
    hooks: Hooks,
    context: c.RunContext,
    task: c.Task,
    plan: BatchPlan,
    recorder: RunRecorder | SilentRecorder,
    checkpoints: Checkpoints,
    log: Any,
) -> Loop:
    config = context.config
    steps_left = max(0, config.train.train_iters - context.step)
    # Not train_iters of them: an earlier attempt may have had global batches of another size.
    wanted = context.consumed_samples + steps_left * config.train.global_batch_size
    evaluations = config.train.eval_iters * config.train.global_batch_size
    datasets = build_datasets(
        config,
        task.datasets(context, wanted, evaluations),
        wanted,
        evaluations,
        storage=hooks.provide("ascend_dataset", config=config),
    )
    read = BatchReader(hooks, context, task.batch_fields, plan)
    step = TrainStep(context, task, hooks, task.roles[0])
    first_of_its_kind = not any(context.layout.coordinate(axis) for axis in ("tp", "cp", "pp"))
    rows = RowHashes(plan, owns=first_of_its_kind)
    fingerprints = StepFingerprints(context, step.bundle, log, rows)
    validation = datasets.validation if config.train.eval_interval else None
    if validation is not None:
        read.require(validation, 0, config.train.eval_iters, "validation")
    read.require(datasets.train, context.consumed_samples, steps_left, "training")
    return Loop(
        context=context,
        step=step,
        readings=Readings(context, step, hooks),
        fingerprints=fingerprints,
        recorder=recorder,
        hooks=hooks,
        train_batches=read(datasets.train, context.consumed_samples, "training", rows.watch),
        validation_batches=(
            (lambda: read(validation, 0, "validation")) if validation is not None else None
        ),
        num_microbatches=plan.num_micro_batches,
        save=(
            (lambda: checkpoints.save(fingerprints.latest))
            if config.checkpoint.save_interval
            else None
        ),
    )
