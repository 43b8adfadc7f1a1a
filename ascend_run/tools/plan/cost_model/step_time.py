"""Estimated step time on a device: matmuls, memory, operations, communication, copies to the host,
reads and writes of files, pipeline bubble.

    compute        flops / (peak * reach), the attention's with a reach of its own
                   +  bytes moved / memory bandwidth
                   +  operations * overhead of an operation
    communication  for each group: bytes on the wire / bandwidth of its slowest link, plus a
                   latency per send; overlapped communication counts only as far as it takes
                   longer than the computation
    host copies    bytes / bandwidth of the link to the host, as far as that takes longer than what
                   they are overlapped with
    disk           bytes written / bandwidth of writes + bytes read / bandwidth of reads
    step           (compute + communication + host copies + disk) of the slowest stage,
                   times 1 + (pp - 1) / (vpp * micro-batches)

Elementwise operations are counted by memory traffic: saved activations are written once and read
twice, and the optimizer reads and writes its state. Where device and host are one memory, a copy
reads and writes it.

Copies to files and from them are complete when their calls return, so nothing overlaps them. All
are counted at the rate of the disk: how much of it the system holds back in free memory, or still
has there when it is read, is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ascend_run.plugin_api.contracts import Communication, Storage
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .devices import CostDevice
from .estimate import RankCost

_PASSES = 3
"""Accesses of a saved activation: written in forward, read by the next operation and in
backward."""
_OF_FORWARD = 1 / 3
"""Share of the computation: one of three matmuls with each weight."""


@attrs.frozen(kw_only=True)
class StepTime:
    """Seconds of one step."""

    matmuls: float
    memory: float
    operations: float
    communication: float
    """Exposed communication."""
    host_copies: float
    """Exposed copies between the device and the host."""
    disk: float
    """Reads and writes of files."""
    bubble: float

    @property
    def total(self) -> float:
        busy = self.matmuls + self.memory + self.operations
        return busy + self.communication + self.host_copies + self.disk + self.bubble


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
    bandwidth = device.memory_bandwidth / share
    passes = _PASSES * saved * cost.rank.num_microbatches / bandwidth
    update = 2 * states / bandwidth
    memory = passes + update
    if device.host_bandwidth is None:  # a copy reads and writes
        moved = sum(each.left + each.returned for each in cost.offloaded.values())
        memory += 2 * (moved + 2 * cost.memory.copied) / bandwidth
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
        host_copies=_host_copies(cost, device, matmuls + passes + operations, update),
        disk=_disk(cost, device) * share,
        bubble=0.0,
    )


def _disk(cost: RankCost, device: CostDevice) -> float:
    """Return the seconds of reads and writes of files, if one rank uses the disk."""
    files = cost.offloaded[Storage.FILE]
    written = files.left + cost.memory.in_files
    read = files.returned + cost.memory.in_files
    return written / device.disk_write_bandwidth + read / device.disk_read_bandwidth


def _host_copies(cost: RankCost, device: CostDevice, computing: float, update: float) -> float:
    """Return the seconds of copies that nothing overlaps. Activations leave during the forward and
    come back during the backward, which waits for the late ones; optimizer states come and leave at
    once, while others are updated, or are updated over the link. Nothing overlaps what passes on
    its way to files and back.

    Args:
        computing: Seconds of forward and backward.
        update: Seconds of the optimizer step.
    """
    if device.host_bandwidth is None:
        return 0.0
    host, files = cost.offloaded[Storage.HOST], cost.offloaded[Storage.FILE]
    memory = cost.memory
    passing = files.left + files.returned + 2 * memory.in_files
    waits = (host.late + passing) / device.host_bandwidth
    overlapped = (
        (host.left, _OF_FORWARD * computing),
        (host.returned - host.late, (1 - _OF_FORWARD) * computing),
        (memory.off_device - memory.in_files, update),
    )
    return waits + sum(
        max(0.0, nbytes / device.host_bandwidth - seconds) for nbytes, seconds in overlapped
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
