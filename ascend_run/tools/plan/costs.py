"""The estimated cost of a run, as records of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import CommOptions
from ascend_run.tools.plan.cost_model.devices import CostDevice, device_of, find_device
from ascend_run.tools.plan.cost_model.estimate import RankCost, expected_costs
from ascend_run.tools.plan.cost_model.memory import Memory
from ascend_run.tools.plan.cost_model.step_time import communication_time, group_shape, step_time
from ascend_run.types.config import RunConfig
from ascend_run.types.cost import Communication
from ascend_run.types.layout import Layout

from .comm_options import comm_options
from .cost_records import (
    Cost,
    CostedPlan,
    ExpectedTime,
    GroupOptions,
    StageCommunication,
    StageCost,
    StageMemory,
)

if TYPE_CHECKING:
    from ascend_run.prepare.prepare import PreparedRun


def cost_data(config: RunConfig, layout: Layout, hooks: Hooks, device: str | None = None) -> Cost:
    """Return the estimated cost of a run, which docs/cost-model.md describes.

    Args:
        device: A name of ``cost_model.devices``, or a file; None: the platform's device. Without a
            device no time is estimated.

    Raises:
        ConfigError: The device is unknown, or a plugin sets options of unknown process groups.
    """
    costs = expected_costs(config, layout, hooks)
    chosen = device_of(config.platform) if device is None else find_device(device)
    return Cost(
        unit="bytes and FLOPs of one optimizer step on one rank",
        tokens=config.train.global_batch_size * config.data.seq_length,
        stages=tuple(_stage(cost, layout, chosen) for cost in costs),
        time=None if chosen is None else _time(config, layout, costs, chosen),
        groups=tuple(
            GroupOptions(group=name, buffer_mb=options.buffer_mb, why=options.why)
            for name, options in comm_options(config, layout, hooks, costs).items()
        )
        or None,
        notes=tuple(dict.fromkeys(_notes(costs))) or None,
    )


def with_costs(prepared: PreparedRun, device: str | None = None) -> PreparedRun:
    """Add the cost to the plan of a prepared run, which becomes a ``CostedPlan``, and the options
    of communicators to the run.

    Args:
        device: As in ``cost_data``.

    Raises:
        ConfigError: As ``cost_data``.
    """
    hooks = Hooks(prepared.instances())
    cost = cost_data(prepared.config, prepared.layout, hooks, device)
    plan = CostedPlan(**attrs.asdict(prepared.plan, recurse=False), cost=cost)
    options = {
        one.group: CommOptions(buffer_mb=one.buffer_mb, why=one.why) for one in cost.groups or ()
    }
    return attrs.evolve(prepared, plan=plan, comm_options=options)


def _notes(costs: Sequence[RankCost]) -> Iterator[str]:
    for cost in costs:
        for plugin, change in cost.changes.items():
            if change.note:
                yield f"{plugin}: {change.note}"


def _stage(cost: RankCost, layout: Layout, device: CostDevice | None) -> StageCost:
    return StageCost(
        pp=cost.rank.pp_rank,
        ranks=layout.world_size // layout.pp,
        layers=len(cost.rank.layers),
        parameters=cost.parameters,
        trained_parameters=cost.trained_parameters,
        memory=_memory(cost.memory),
        communication=tuple(
            _communication(collective, layout, device) for collective in cost.communication
        ),
        flops=cost.flops,
        model_flops=cost.model_flops,
        changed_by=tuple(cost.changes),
    )


def _memory(memory: Memory) -> StageMemory:
    return StageMemory(
        weights=round(memory.weights),
        gradients=round(memory.gradients),
        optimizer=round(memory.optimizer),
        activations=round(memory.activations),
        buffers=round(memory.buffers),
        peak=round(memory.peak),
        host=round(memory.host),
        moment=memory.moment,
    )


def _communication(
    collective: Communication, layout: Layout, device: CostDevice | None
) -> StageCommunication:
    return StageCommunication(
        operation=collective.operation,
        group=collective.group,
        group_size=group_shape(layout, collective)[0],
        calls=round(collective.calls),
        sent_bytes=round(collective.sent_bytes),
        overlapped=collective.overlapped,
        why=collective.why,
        seconds=None if device is None else communication_time(layout, collective, device),
    )


def _time(
    config: RunConfig, layout: Layout, costs: Sequence[RankCost], device: CostDevice
) -> ExpectedTime:
    time = step_time(config, layout, costs, device)
    ranks = layout.world_size // layout.pp
    model_flops = sum(cost.model_flops for cost in costs) * ranks
    peak = device.flops[config.train.precision]
    if device.shared:
        peak /= min(config.run.nproc, layout.world_size)
    tokens = config.train.global_batch_size * config.data.seq_length
    return ExpectedTime(
        device=device.name,
        source=device.source,
        matmuls=time.matmuls,
        memory=time.memory,
        operations=time.operations,
        communication=time.communication,
        host_copies=time.host_copies,
        disk=time.disk,
        bubble=time.bubble,
        step=time.total,
        tokens_per_second=tokens / time.total,
        mfu=model_flops / (time.total * peak * layout.world_size),
        memory_bytes=device.memory_bytes,
        fits=all(cost.memory.peak <= device.memory_bytes for cost in costs),
    )
