"""What a run is expected to cost, as ``plan`` shows it: the JSON section and the text tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from ascend_run.core.cost.devices import CostDevice, device_of, find_device
from ascend_run.core.cost.estimate import RankCost, expected_costs
from ascend_run.core.cost.step_time import StepTime, group_shape, message_time, step_time
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.layout import Layout

from .tables import table

if TYPE_CHECKING:
    from .planning import Prepared

_Row: TypeAlias = tuple[str, ...]
_MEMORY = ("weights", "gradients", "optimizer", "activations", "buffers")
_TIMES = ("products", "memory", "operations", "messages", "bubble")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = ("", "thousand", "million", "billion", "trillion")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def cost_data(
    config: RunConfig, layout: Layout, hooks: Hooks, device: str | None = None
) -> dict[str, Any]:
    """The section ``cost`` of ``plan.json``; docs/cost-model.md describes it.

    Args:
        device: One of ``core.cost.devices``, or a file; None is the platform's own, and where
            there is none no time is estimated.

    Raises:
        ConfigError: There is no such device.
    """
    costs = expected_costs(config, layout, hooks)
    chosen = device_of(config.platform) if device is None else find_device(device)
    data: dict[str, Any] = {
        "unit": "bytes and FLOPs of one optimizer step on one rank",
        "tokens": config.train.global_batch_size * config.data.seq_length,
        "stages": [_stage(cost, layout, chosen) for cost in costs],
    }
    if chosen is not None:
        time = step_time(config, layout, costs, chosen)
        data["time"] = _time(config, layout, costs, chosen, time)
    return data


def on_device(prepared: Prepared, device: str | None) -> Prepared:
    """A prepared run with its costs on another device than its platform's own.

    Raises:
        ConfigError: There is no such device.
    """
    if device is None:
        return prepared
    hooks = Hooks(prepared.instances())
    cost = cost_data(prepared.config, prepared.layout, hooks, device)
    return attrs.evolve(prepared, plan={**prepared.plan, "cost": cost})


def _stage(cost: RankCost, layout: Layout, device: CostDevice | None) -> dict[str, Any]:
    memory = cost.memory
    return {
        "pp": cost.rank.pp_rank,
        "ranks": layout.world_size // layout.pp,
        "layers": len(cost.rank.layers),
        "parameters": cost.parameters,
        "trained_parameters": cost.trained_parameters,
        "memory": {
            **{name: round(getattr(memory, name)) for name in _MEMORY},
            "peak": round(memory.peak),
            "host": round(memory.host),
            "moment": memory.moment,
        },
        "messages": [
            {
                "operation": message.operation,
                "group": message.group,
                "group_size": group_shape(layout, message)[0],
                "calls": round(message.calls),
                "sent_bytes": round(message.sent_bytes),
                "hidden": message.hidden,
                "why": message.why,
            }
            | ({} if device is None else {"seconds": message_time(layout, message, device)})
            for message in cost.messages
        ],
        "flops": cost.flops,
        "model_flops": cost.model_flops,
        "changed_by": [*cost.changes],
    }


def _time(
    config: RunConfig,
    layout: Layout,
    costs: Sequence[RankCost],
    device: CostDevice,
    time: StepTime,
) -> dict[str, Any]:
    ranks = layout.world_size // layout.pp
    model_flops = sum(cost.model_flops for cost in costs) * ranks
    peak = device.flops[config.train.precision]
    if device.shared:
        peak /= min(config.run.nproc, layout.world_size)
    tokens = config.train.global_batch_size * config.data.seq_length
    return {
        "device": device.name,
        "source": device.source,
        **attrs.asdict(time),
        "step": time.total,
        "tokens_per_second": tokens / time.total,
        "mfu": model_flops / (time.total * peak * layout.world_size),
        "memory_bytes": device.memory_bytes,
        "fits": all(cost.memory.peak <= device.memory_bytes for cost in costs),
    }


def cost_lines(cost: Mapping[str, Any]) -> Iterator[str]:
    """The section as text: memory, messages, FLOPs and time; stages that expect the same are one
    row."""
    stages = cost["stages"]
    yield "expected memory on one rank, at the peak of a step"
    header: _Row = ("pp", "parameters", *_MEMORY, "peak", "on the host", "when")
    yield from _indented(table(header, list(_rows(stages, _memory_rows))))
    if rows := list(_rows(stages, _message_rows)):
        yield ""
        yield "expected messages of one rank in a step"
        header = ("pp", "group", "ranks", "operation", "calls", "sent")
        yield from _indented(table(header, rows))
    yield ""
    yield "expected FLOPs of one rank in a step"
    header = ("pp", "computed", "of the model")
    yield from _indented(table(header, list(_rows(stages, _flops_rows))))
    if "time" in cost:
        yield ""
        yield from _time_lines(cost["time"])


def _time_lines(time: Mapping[str, Any]) -> Iterator[str]:
    parts = ", ".join(f"{name} {seconds(time[name])}" for name in _TIMES)
    yield f"expected step on {time['device']}: {seconds(time['step'])} ({parts})"
    yield f"  {time['tokens_per_second']:,.0f} tokens/s, {time['mfu']:.1%} of the peak"
    if not time["fits"]:
        yield f"  it does not fit in {size(time['memory_bytes'])} of memory"


def _kinds(stages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Stages that expect the same, as one: ("1 to 6", what each expects)."""
    groups: list[list[Mapping[str, Any]]] = []
    for stage in stages:
        if groups and _expected(groups[-1][-1]) == _expected(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    for group in groups:
        first, last = group[0]["pp"], group[-1]["pp"]
        yield str(first) if first == last else f"{first} to {last}", group[0]


def _expected(stage: Mapping[str, Any]) -> dict[str, Any]:
    memory = {name: value for name, value in stage["memory"].items() if name != "moment"}
    return {**stage, "pp": None, "memory": memory}


def _rows(
    stages: Sequence[Mapping[str, Any]], rows_of: Callable[[Mapping[str, Any]], list[_Row]]
) -> Iterator[_Row]:
    """The rows of every stage behind its number; of neighbours that have the same, once."""
    shown = [rows_of(stage) for stage in stages]
    first = 0
    for last in range(len(stages)):
        if last + 1 < len(stages) and shown[last + 1] == shown[first]:
            continue
        name = str(first) if first == last else f"{first} to {last}"
        yield from ((name, *row) for row in shown[first])
        first = last + 1


def _memory_rows(stage: Mapping[str, Any]) -> list[_Row]:
    memory = stage["memory"]
    sizes = (size(memory[part]) for part in (*_MEMORY, "peak"))
    host = size(memory["host"]) if memory["host"] else "-"
    return [(count(stage["parameters"]), *sizes, host, memory["moment"])]


def _message_rows(stage: Mapping[str, Any]) -> list[_Row]:
    """One for each group and operation."""
    summed: dict[tuple[str, str, str], list[float]] = {}
    for message in stage["messages"]:
        key = message["group"], str(message["group_size"]), message["operation"]
        row = summed.setdefault(key, [0, 0])
        row[0] += message["calls"]
        row[1] += message["sent_bytes"]
    return [(*key, f"{calls:,.0f}", size(sent)) for key, (calls, sent) in summed.items()]


def _flops_rows(stage: Mapping[str, Any]) -> list[_Row]:
    return [(flops(stage["flops"]), flops(stage["model_flops"]))]


def size(nbytes: float) -> str:
    """``1.50 GiB``."""
    return _scaled(nbytes, 1024, _BYTES)


def count(number: float) -> str:
    """``6.74 billion``."""
    return _scaled(number, 1000, _COUNTS).strip()


def flops(number: float) -> str:
    """``3.20 TFLOP``."""
    return _scaled(number, 1000, _FLOPS)


def seconds(number: float) -> str:
    """``12.3 ms``."""
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.2f} ms"


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while abs(number) >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.2f} {units[power]}" if power else f"{number:.0f} {units[0]}"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
