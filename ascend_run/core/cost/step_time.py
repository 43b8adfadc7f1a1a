"""How long a step takes on a device: products, memory, operations, messages, the pipeline's bubble.

    compute   flops / (peak * reach), the attention's with a reach of its own
              +  bytes moved / memory bandwidth
              +  operations * what the device takes for each beside its arithmetic
    messages  for each group: bytes on the wire / the bandwidth of the link that the group spans,
              and a latency for each message; what travels beside the computation counts only as
              far as it takes longer than that
    step      (compute + messages) of the slowest stage, times 1 + (pp - 1) / (vpp * micro-batches)

Elementwise work is counted by the bytes that it moves: what is kept is written once and read twice,
and the optimizer reads and writes its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import Messages
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.plugin_api.layout import Layout

from .devices import CostDevice
from .estimate import RankCost

_PASSES = 3
"""Over what is kept: written in forward, read by what follows it, read in backward."""


@attrs.frozen(kw_only=True)
class StepTime:
    """Seconds of one step."""

    products: float
    memory: float
    operations: float
    messages: float
    """That nothing hides."""
    bubble: float

    @property
    def total(self) -> float:
        return self.products + self.memory + self.operations + self.messages + self.bubble


def step_time(
    config: RunConfig, layout: Layout, costs: Sequence[RankCost], device: CostDevice
) -> StepTime:
    """Of the slowest stage, which the others wait for.

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
    passes = (layout.vpp or 1) * costs[0].rank.num_micro_batches
    return attrs.evolve(slowest, bubble=slowest.total * (layout.pp - 1) / passes)


def _stage_time(
    config: RunConfig, layout: Layout, cost: RankCost, device: CostDevice, share: int
) -> StepTime:
    precision, attention = config.train.precision, min(cost.attention_flops, cost.flops)
    products = (cost.flops - attention) * share / device.products(precision)
    products += attention * share / device.attention_products(precision)
    kept = sum(t.nbytes for tensors in cost.rank.kept.values() for t in tensors)
    moved = _PASSES * kept * cost.rank.num_micro_batches + 2 * cost.memory.optimizer
    memory = moved / (device.memory_bandwidth / share)
    seen = hidden = 0.0
    for message in cost.messages:
        seconds = message_time(layout, message, device)
        hidden, seen = (hidden + seconds, seen) if message.hidden else (hidden, seen + seconds)
    operations = cost.operations * device.operation
    uncovered = max(0.0, hidden - products - memory - operations)
    return StepTime(
        products=products,
        memory=memory,
        operations=operations,
        messages=seen + uncovered,
        bubble=0.0,
    )


def message_time(layout: Layout, message: Messages, device: CostDevice) -> float:
    """Seconds in a step: the bytes of a ring, the rounds of a tree."""
    size, extent = group_shape(layout, message)
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
    }.get(message.operation, (1.0, 1))
    return message.sent_bytes * on_the_wire / bandwidth + message.calls * hops * device.latency


def group_shape(layout: Layout, message: Messages) -> tuple[int, int]:
    """Ranks of one group, and how many ranks lie from its first to its last."""
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
    }.get(message.group, (message.group_size, message.group_stride))
    return size, (size - 1) * stride + 1
