"""Rows of the result: one file, one table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import attrs

RESULTS = Path(__file__).parent / "results" / "latest.json"


@attrs.frozen(kw_only=True)
class Row:
    """One comparison. ``ratio`` above 1 means that ours is better, whatever the unit."""

    name: str
    device: str
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    goal: str
    met: bool
    note: str


def compared(
    *,
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    goal: float,
    note: str,
    device: str = "cpu",
    larger_is_better: bool = True,
) -> Row:
    """A row from alternating pairs: the median of the pairs' ratios."""
    pairs = zip(ours, peer, strict=True)
    ratios = sorted(a / b if larger_is_better else b / a for a, b in pairs)
    ratio = statistics.median(ratios)
    spread = f"{len(ratios)} pairs, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    return Row(
        name=name,
        device=device,
        ours=round(statistics.median(ours), 4),
        peer=round(statistics.median(peer), 4),
        unit=unit,
        ratio=round(ratio, 3),
        goal=f">= {goal:g} x",
        met=ratio >= goal,
        note=f"{note}; {spread}",
    )


def bounded(
    *, name: str, value: float, unit: str, limit: float, note: str, device: str = "cpu"
) -> Row:
    """A row that has a limit and no peer."""
    return Row(
        name=name,
        device=device,
        ours=round(value, 4),
        peer=None,
        unit=unit,
        ratio=None,
        goal=f"<= {limit:g} {unit}",
        met=value <= limit,
        note=note,
    )


def write_results(rows: Sequence[Row], path: Path = RESULTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")


def print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ascend-run benchmarks")
    for column in ("name", "ours", "peer", "unit", "ratio", "goal", "met", "note"):
        table.add_column(column, justify="right" if column in ("ours", "peer", "ratio") else "left")
    for row in rows:
        cells = (row.name, row.ours, row.peer, row.unit, row.ratio, row.goal)
        shown = ("" if cell is None else str(cell) for cell in cells)
        table.add_row(*shown, "yes" if row.met else "[bold red]no", row.note)
    Console(width=160).print(table)
