"""The estimated cost of a run as text tables, and numbers with units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ascend_run.tools.terminal.tables import table

from .cost_records import Cost, ExpectedTime, StageCost

_Row: TypeAlias = tuple[str, ...]
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = ("", "thousand", "million", "billion", "trillion")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def cost_lines(cost: Cost) -> Iterator[str]:
    """Yield the cost as text: memory, communication, FLOPs and time.

    Stages with equal estimates are one row.
    """
    stages = cost.stages
    yield "estimated memory of one rank, at the peak of a step"
    parts = stages[0].memory.parts
    header: _Row = ("pp", "parameters", *parts, "peak", "on the host", "when")
    yield from _indented(table(header, list(_rows(stages, _memory_rows))))
    yield from _indented(f"note: {note}" for note in cost.notes or ())
    if rows := list(_rows(stages, _communication_rows)):
        yield ""
        yield "estimated communication of one rank in a step"
        header = ("pp", "group", "ranks", "operation", "calls", "sent")
        yield from _indented(table(header, rows))
    if cost.groups:
        yield ""
        yield "buffers of process groups, on platforms whose backend has one for each (hccl)"
        groups = [(of.group, f"{of.buffer_mb} MiB", of.why) for of in cost.groups]
        yield from _indented(table(("group", "buffer", "for"), groups))
    yield ""
    yield "estimated FLOPs of one rank in a step"
    header = ("pp", "hardware", "model")
    yield from _indented(table(header, list(_rows(stages, _flops_rows))))
    if cost.time is not None:
        yield ""
        yield from _time_lines(cost.time)


def _time_lines(time: ExpectedTime) -> Iterator[str]:
    parts = ", ".join(f"{label} {seconds(part)}" for label, part in time.parts.items())
    yield f"estimated step time on {time.device}: {seconds(time.step)} ({parts})"
    yield f"  {time.tokens_per_second:,.0f} tokens/s, {time.mfu:.1%} MFU"
    if not time.fits:
        yield f"  it does not fit in {size(time.memory_bytes)} of memory"


def _rows(
    stages: Sequence[StageCost], rows_of: Callable[[StageCost], list[_Row]]
) -> Iterator[_Row]:
    """The rows of every stage, prefixed with its number; adjacent stages with equal rows are
    merged."""
    shown = [rows_of(stage) for stage in stages]
    first = 0
    for last in range(len(stages)):
        if last + 1 < len(stages) and shown[last + 1] == shown[first]:
            continue
        name = str(first) if first == last else f"{first} to {last}"
        yield from ((name, *row) for row in shown[first])
        first = last + 1


def _memory_rows(stage: StageCost) -> list[_Row]:
    memory = stage.memory
    sizes = (size(part) for part in (*memory.parts.values(), memory.peak))
    host = size(memory.host) if memory.host else "-"
    return [(count(stage.parameters), *sizes, host, memory.moment)]


def _communication_rows(stage: StageCost) -> list[_Row]:
    """One row per group and operation."""
    summed: dict[tuple[str, str, str], list[float]] = {}
    for collective in stage.communication:
        key = collective.group, str(collective.group_size), collective.operation
        row = summed.setdefault(key, [0, 0])
        row[0] += collective.calls
        row[1] += collective.sent_bytes
    return [(*key, f"{calls:,.0f}", size(sent)) for key, (calls, sent) in summed.items()]


def _flops_rows(stage: StageCost) -> list[_Row]:
    return [(flops(stage.flops), flops(stage.model_flops))]


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
