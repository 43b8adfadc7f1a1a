"""Process groups: Megatron's, and those that plugins planned."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.rendezvous import rendezvous

from ascend_run.core.hooks import Hooks
from ascend_run.core.launch.rank import ATTEMPT_VARIABLE
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.errors import ConfigError, HookError
from ascend_run.plugin_api.layout import Layout


@contextmanager
def process_groups(
    config: RunConfig, layout: Layout, device: c.Device, hooks: Hooks
) -> Iterator[ProcessGroupCollection]:
    """Every group of the run, destroyed at the end.

    The default group is made by whoever launched this process (``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``), or of this process alone; one that exists already is used and left alone.
    """
    timeout = datetime.timedelta(seconds=config.run.timeout_seconds)
    owns_default = not dist.is_initialized()
    if owns_default:
        _init_default_group(layout, device.backend, timeout)
    try:
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
        _create_plugin_groups(groups, hooks, config, layout, timeout)
        yield groups
    finally:
        parallel_state.destroy_model_parallel()
        if owns_default:
            dist.destroy_process_group()


def _init_default_group(layout: Layout, backend: str, timeout: datetime.timedelta) -> None:
    """
    Raises:
        ConfigError: The ranks cannot meet where the environment says.
    """
    if layout.world_size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    try:
        rank, size = layout.rank, layout.world_size
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=store_of_attempt(store), rank=rank, world_size=size, timeout=timeout
        )
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        names = ("MASTER_ADDR", "MASTER_PORT")
        where = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        reason = str(error).partition("\n")[0]
        advice = (
            "MASTER_ADDR must be the host of rank 0 as every rank reaches it, and MASTER_PORT a "
            "port that is free there; all ranks must start within run.timeout_seconds"
        )
        raise ConfigError(
            f"rank {layout.rank} of {layout.world_size} cannot meet the others at {where}",
            [reason, advice],
        ) from error


def store_of_attempt(store: dist.Store) -> dist.Store:
    """A part of the store that ranks of an earlier start have not written to.

    torch's elastic agent keeps one store over all restarts, and a rank that finds the address of a
    rank that is gone cannot connect to it.
    """
    attempt = os.environ.get(ATTEMPT_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)


def _create_plugin_groups(
    groups: Any, hooks: Hooks, config: RunConfig, layout: Layout, timeout: datetime.timedelta
) -> None:
    """Every rank creates every group, in one order, and keeps those that it is in.

    Raises:
        HookError: A name is one of Megatron's.
    """
    planned = hooks.merge("ascend_process_groups", config=config, layout=layout)
    if taken := sorted({field.name for field in dataclasses.fields(groups)} & planned.keys()):
        raise HookError(
            "ascend_process_groups: Megatron has groups of these names; choose others",
            [repr(name) for name in taken],
        )
    for name in sorted(planned):
        for ranks in planned[name]:
            group = dist.new_group(list(ranks), timeout=timeout)
            if layout.rank in ranks:
                setattr(groups, name, group)
