"""Process groups: Megatron's, and those that plugins define."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ascend_run.core.config.group_names import MEGATRON_GROUPS
from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied
from ascend_run.core.rank.default_group import default_group
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout


@contextmanager
def process_groups(
    config: RunConfig,
    layout: Layout,
    device: c.Device,
    hooks: Hooks,
    options: Mapping[str, c.CommOptions],
) -> Iterator[ProcessGroupCollection]:
    """Create all process groups of the run and destroy them on exit.

    The default group comes from the launcher's environment (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``), or holds this process only. An existing default group is used and not
    destroyed.

    Args:
        options: Name of a process group -> options of its communicator.
    """
    timeout = datetime.timedelta(seconds=config.run.timeout_seconds)
    own = {name: device.group_options(of_group) for name, of_group in options.items()}
    with default_group(layout, device.backend, timeout):
        try:
            with _megatrons_options(own):
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=layout.tp,
                    pipeline_model_parallel_size=layout.pp,
                    virtual_pipeline_model_parallel_size=layout.vpp,
                    context_parallel_size=layout.cp,
                    expert_model_parallel_size=layout.ep,
                    expert_tensor_parallel_size=layout.expt_tp,
                    distributed_timeout_minutes=max(1, config.run.timeout_seconds // 60),
                    create_gloo_process_groups=False,
                )
            groups = ProcessGroupCollection.use_mpu_process_groups()
            _create_plugin_groups(groups, hooks, config, layout, timeout, own)
            yield groups
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def _megatrons_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Let Megatron create its groups with the backend's options, which it makes for NCCL alone."""
    of_megatron = {
        MEGATRON_GROUPS[name]: own
        for name, own in options.items()
        if own is not None and name in MEGATRON_GROUPS
    }
    if not of_megatron:
        yield
        return
    patch = c.Patch(
        target="megatron.core.parallel_state:get_nccl_options",
        replacement=lambda inner: lambda name, known: of_megatron.get(name) or inner(name, known),
        wraps=True,
        why="process groups get the options of their own backend",
        versions="==0.16.1",
        source_hash="53035850c97be197",
        until="initialize_model_parallel takes the options of any backend",
    )
    with applied([("process groups", patch)]):
        yield


def _create_plugin_groups(
    groups: ProcessGroupCollection,
    hooks: Hooks,
    config: RunConfig,
    layout: Layout,
    timeout: datetime.timedelta,
    options: Mapping[str, Any],
) -> None:
    """Create the plugins' groups on every rank, in the same order.

    Each rank keeps the groups that contain it.

    Raises:
        HookError: A name is already used by Megatron.
    """
    planned = hooks.merge("ascend_process_groups", config=config, layout=layout)
    if taken := sorted({field.name for field in dataclasses.fields(groups)} & planned.keys()):
        raise HookError(
            "ascend_process_groups: Megatron has groups of these names; choose others",
            [repr(name) for name in taken],
        )
    for name in sorted(planned):
        for ranks in planned[name]:
            group = dist.new_group(list(ranks), timeout=timeout, pg_options=options.get(name))
            if layout.rank in ranks:
                setattr(groups, name, group)
