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
from .data.batches import BatchPlan, cut_sequence, micro_batches, to_device
from .data.samples import build_datasets
from .folder import write_run_folder
from .hooks import Hooks
from .launch.failures import record_failure
from .log.setup import configure_logging
from .model.build import build_model
from .patches import applied_patches
from .recorder import RunRecorder, SilentRecorder
from .settings import process_settings
from .train.checkpointing import Checkpoints
from .train.data_parallel import wrap_data_parallel
from .train.groups import process_groups
from .train.loop import Loop
from .train.optimizer import build_optimizer
from .train.readings import Readings
from .train.step import TrainStep
from .world import World


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
    world = World.from_environment()
    hooks = Hooks(request.plugins)
    device = hooks.require("ascend_device", local_rank=world.local_rank)
    layout = layout_of(request.config, world.size, world.rank)
    device.activate()
    try:
        with (
            applied_patches(hooks),
            process_settings(request.config, hooks),
            process_groups(request.config, layout, device, hooks) as groups,
        ):
            require_equal_plugins(request.lock, GroupRanks(device=device.torch_device))
            yield (
                hooks,
                c.RunContext(config=request.config, layout=layout, device=device, groups=groups),
            )
    finally:
        device.deactivate()


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
                folder, config_toml=request.config_toml, plan=request.plan, lock=request.lock
            )
        dist.barrier()
        with configure_logging(folder / "log.jsonl", context.layout.rank) as log:
            for order, plugin in enumerate(request.plugins):
                log.logger.info("plugin.enabled", plugin=plugin.manifest.name, order=order)
            _train(request, hooks, context, folder, log.logger)


def _train(
    request: RunRequest, hooks: Hooks, context: c.RunContext, folder: Path, log: Any
) -> None:
    config = request.config
    task: c.Task = hooks.require("ascend_task", config=config)
    role = task.roles[0]
    plan = batch_plan(config, context.layout)
    seed_everything(config, context.layout)
    build_models(task, hooks, context, plan.num_micro_batches)
    checkpoints = Checkpoints(hooks, context, folder)
    checkpoints.restore(log)
    if context.layout.rank == 0:
        recorder = RunRecorder(folder, start=context.step, total=config.train.train_iters, log=log)
    else:
        recorder = SilentRecorder()
    ended: tuple[str, dict[str, Any]] = ("finish", {})
    try:
        loop = _build_loop(hooks, context, task, role, plan, recorder, checkpoints)
        hooks.event("ascend_before_run")(context=context)
        loop.run()
    except BaseException as error:
        record_failure(error, rank=context.layout.rank)
        ended = ("failure", {"error": f"{type(error).__name__}: {error}"})
        hooks.event("ascend_after_failure")(context=context, error=error)
        raise
    finally:
        recorder.close(ended[0], **ended[1])
        hooks.event("ascend_after_run")(context=context)


def batch_plan(config: RunConfig, layout: Layout) -> BatchPlan:
    """How a global batch is dealt out to this rank."""
    return BatchPlan(
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        dp_rank=layout.coordinate("dp"),
        dp_size=layout.dp,
    )


def seed_everything(config: RunConfig, layout: Layout) -> None:
    """One seed for every generator; ranks that hold different parts of a model draw apart."""
    seed = config.run.seed + 100 * layout.coordinate("pp")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(config.run.seed)


def build_models(task: c.Task, hooks: Hooks, context: c.RunContext, num_microbatches: int) -> None:
    """Every role's model into the context; the first role trains."""
    config, groups = context.config, context.groups
    for role in task.roles:
        bundle = build_model(config, hooks, groups, context.device, role=role)
        context.models[role] = bundle
        if role == task.roles[0]:
            wrap_data_parallel(bundle, config, hooks, groups, num_microbatches)
            build_optimizer(bundle, config, hooks, groups)


def _build_loop(
    hooks: Hooks,
    context: c.RunContext,
    task: c.Task,
    role: str,
    plan: BatchPlan,
    recorder: RunRecorder | SilentRecorder,
    checkpoints: Checkpoints,
) -> Loop:
    config = context.config
    evaluations = config.train.eval_iters * config.train.global_batch_size
    wanted = config.train.train_iters * config.train.global_batch_size
    datasets = build_datasets(
        config,
        task.datasets(context, wanted, evaluations),
        wanted,
        evaluations,
        storage=hooks.provide("ascend_dataset", config=config),
    )

    def batches(dataset: Any, consumed_samples: int) -> Iterator[c.Batch]:
        source = micro_batches(dataset, task.batch_fields, plan, consumed_samples)
        return cut_to_rank(hooks.wrap("ascend_batch", source, config=config), hooks, context)

    step = TrainStep(context, task, hooks, role)
    validation = datasets.validation if config.train.eval_interval else None
    return Loop(
        context=context,
        step=step,
        readings=Readings(context, step, hooks),
        recorder=recorder,
        hooks=hooks,
        train_batches=batches(datasets.train, context.consumed_samples),
        validation_batches=(lambda: batches(validation, 0)) if validation is not None else None,
        num_microbatches=plan.num_micro_batches,
        save=checkpoints.save if config.checkpoint.save_interval else None,
    )


def cut_to_rank(
    batches: Iterator[c.Batch], hooks: Hooks, context: c.RunContext
) -> Iterator[c.Batch]:
    """This rank's part of every micro-batch's sequence, on its device."""
    partition = hooks.provide("ascend_sequence_partition", config=context.config)
    cp_rank, cp_size = context.layout.coordinate("cp"), context.layout.cp
    for batch in batches:
        if partition is not None:
            batch = cut_sequence(batch, partition, cp_rank, cp_size)
        yield to_device(batch, context.device.torch_device)
