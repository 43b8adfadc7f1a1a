"""Estimated step time on a device: matmuls, memory, operations, communication, pipeline bubble.

    compute        flops / (peak * reach), the attention's with a reach of its own
                   +  bytes moved / memory bandwidth
                   +  operations * overhead of an operation
    communication  for each group: bytes on the wire / bandwidth of its slowest link, plus a
                   latency per send; overlapped communication counts only as far as it takes
                   longer than the computation
    step           (compute + communication) of the slowest stage,
                   times 1 + (pp - 1) / (vpp * micro-batches)

Elementwise operations are counted by memory traffic: saved activations are written once and read
twice, and the optimizer reads and writes its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ascend_run.plugin_api.contracts import Communication
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .devices import CostDevice
from .estimate import RankCost

_PASSES = 3
"""Accesses of a saved activation: written in forward, read by the next operation and in
backward."""


@attrs.frozen(kw_only=True)
class StepTime:
    """Seconds of one step."""

    matmuls: float
    memory: float
    operations: float
    communication: float
    """Exposed communication."""
    bubble: float

    @property
    def total(self) -> float:
        return self.matmuls + self.memory + self.operations + self.communication + self.bubble


def step_time(
    config: RunConfig, layout: Layout, costs: Sequence[RankCost], device: CostDevice
) -> StepTime:
    """Estimate the step time, which the slowest stage determines.

    Raises:
        ConfigError: The device has no rate for the run's precision.
    """
    if config.train.precision not in device.flops:
        raise ConfigError(
            f"device {device.name!r} has no rate for train.precision={config.train.precision}; its "
            f"flops name {', '.join(device.flops) or 'none'}"
        )
    share = min(config.run.nproc, layout.world_size) if device.shared else 1
    times = [_stage_time(config, layout, cost, device, share) for cost in costs]
    slowest = max(times, key=lambda time: time.total)
    passes = (layout.vpp or 1) * costs[0].rank.num_microbatches
    return attrs.evolve(slowest, bubble=slowest.total * (layout.pp - 1) / passes)


def _stage_time(
    config: RunConfig, layout: Layout, cost: RankCost, device: CostDevice, share: int
) -> StepTime:
    precision, attention = config.train.precision, min(cost.attention_flops, cost.flops)
    matmuls = (cost.flops - attention) * share / device.matmul_flops(precision)
    matmuls += attention * share / device.attention_matmul_flops(precision)
    saved = sum(t.nbytes for tensors in cost.rank.saved.values() for t in tensors)
    states = cost.memory.optimizer + cost.memory.off_device
    moved = _PASSES * saved * cost.rank.num_microbatches + 2 * states
    memory = moved / (device.memory_bandwidth / share)
    seen = hidden = 0.0
    for collective in cost.communication:
        seconds = communication_time(layout, collective, device)
        hidden, seen = (
            (hidden + seconds, seen) if collective.overlapped else (hidden, seen + seconds)
        )
    operations = cost.operations * device.operation
    uncovered = max(0.0, hidden - matmuls - memory - operations)
    return StepTime(
        matmuls=matmuls,
        memory=memory,
        operations=operations,
        communication=seen + uncovered,
        bubble=0.0,
    )


def communication_time(layout: Layout, collective: Communication, device: CostDevice) -> float:
    """Return the seconds of communication in a step: bandwidth of a ring, latency of a tree."""
    size, extent = group_shape(layout, collective)
    if size <= 1:
        return 0.0
    inside = extent <= device.per_node
    bandwidth = device.node_bandwidth if inside else device.network_bandwidth
    rounds = math.ceil(math.log2(size))
    on_the_wire, hops = {
        "all_reduce": (2 * (size - 1) / size, 2 * rounds),
        "all_gather": (size - 1, rounds),
        "reduce_scatter": ((size - 1) / size, rounds),
        "all_to_all": ((size - 1) / size, 1),
        "broadcast": (1.0, rounds),
        "reduce": (1.0, rounds),
    }.get(collective.operation, (1.0, 1))
    return (
        collective.sent_bytes * on_the_wire / bandwidth + collective.calls * hops * device.latency
    )


def group_shape(layout: Layout, collective: Communication) -> tuple[int, int]:
    """Return the size of a group, and the number of ranks from its first to its last one."""
    dense, expert = layout.tp * layout.cp, layout.expt_tp * layout.ep
    stages = layout.world_size // layout.pp
    size, stride = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "dp": (layout.dp, dense),
        "dp_cp": (layout.dp * layout.cp, layout.tp),
        "mp": (layout.tp * layout.pp, stages),
        "pp": (layout.pp, stages),
        "embd": (min(2, layout.pp), stages * (layout.pp - 1)),
        "expt_tp": (layout.expt_tp, 1),
        "ep": (layout.ep, layout.expt_tp),
        "tp_ep": (expert, 1),
        "expt_dp": (layout.expt_dp, expert),
    }.get(collective.group, (collective.group_size, collective.group_stride))
    return size, (size - 1) * stride + 1
