"""Rows of the results, one per comparison, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

FOLDER: Final = Path(__file__).parent / "results"
RESULTS: Final = FOLDER / "latest.json"
"""Results of a full run; in git."""
PARTIAL: Final = FOLDER / "partial.json"
"""Results of other runs; not in git."""
NO_GPU: Final = "gpu: none on this machine"
"""Device of a row that needs another machine, which is not an error."""


@attrs.frozen(kw_only=True)
class Row:
    """One comparison. ``ratio`` above 1 means that ours is better, whatever the unit."""

    name: str
    device: str
    ours: float | None
    """Median; None if it was not measured, for the reason in ``note``."""
    peer: float | None
    unit: str
    ratio: float | None
    goal: str
    """``>= 1.35 x`` of the ratio, or ``<= 80 ns`` of our own."""
    met: bool
    note: str

    def margin(self) -> float | None:
        """Result / goal, or limit / result; the goal is met if at least 1. None: not measured."""
        direction, number = self.goal.split()[:2]
        if direction == ">=":
            return None if self.ratio is None else self.ratio / float(number)
        return None if self.ours is None else float(number) / max(self.ours, 1e-9)


def compared(
    *,
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    goal: float,
    note: str,
    device: str,
    larger_is_better: bool = True,
) -> Row:
    """Return a row from alternating pairs: the median of the pairs' ratios."""
    ratios = pair_ratios(ours, peer, larger_is_better=larger_is_better)
    ratio = statistics.median(ratios)
    return Row(
        name=name,
        device=device,
        ours=rounded(statistics.median(ours)),
        peer=rounded(statistics.median(peer)),
        unit=unit,
        ratio=rounded(ratio),
        goal=_at_least(goal),
        met=ratio >= goal,
        note=f"{spread(ratios)}; {note}",
    )


def bounded(
    *,
    name: str,
    value: float,
    unit: str,
    limit: float,
    note: str,
    device: str,
    peer: float | None = None,
) -> Row:
    """Return a row with a limit; a peer's value is for information only."""
    return Row(
        name=name,
        device=device,
        ours=rounded(value),
        peer=None if peer is None else rounded(peer),
        unit=unit,
        ratio=None if peer is None or value <= 0 else rounded(peer / value),
        goal=f"<= {limit:g} {unit}",
        met=value <= limit,
        note=note,
    )


def failed(row: Row, reason: str) -> Row:
    """Return the row of a measurement that is invalid."""
    return attrs.evolve(row, met=False, note=f"FAILED: {reason}; {row.note}")


def unmeasured(*, name: str, goal: str, reason: str, device: str) -> Row:
    """Return the row of a benchmark that could not be measured; its goal is not met."""
    return Row(
        name=name,
        device=device,
        ours=None,
        peer=None,
        unit="",
        ratio=None,
        goal=goal,
        met=False,
        note=f"not measured: {reason}",
    )


def pair_ratios(
    ours: Sequence[float], peer: Sequence[float], *, larger_is_better: bool = True
) -> list[float]:
    """Return the ratio of each pair, above 1 if ours is better, in ascending order."""
    pairs = zip(ours, peer, strict=True)
    return sorted(a / b if larger_is_better else b / a for a, b in pairs)


def spread(ratios: Sequence[float]) -> str:
    """Format the number of pairs, and the worst and best ratio."""
    count = f"{len(ratios)} pair{'s' if len(ratios) != 1 else ''}"
    return f"{count}, {min(ratios):.3f} to {max(ratios):.3f} x"


def rounded(value: float) -> float:
    """Round to four digits; more would be noise."""
    return float(f"{value:.4g}")


def _at_least(goal: float) -> str:
    return f">= {goal:.3g} x"


def write_rows(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read rows written by ``write_rows``.

    Raises:
        TypeError: A row has unknown or missing fields.
        ValueError: The file is not valid JSON.
    """
    return [Row(**fields) for fields in json.loads(path.read_text())]


def print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ascend-run benchmarks", caption="ratio above 1: ours is better")
    for column in ("name", "ours", "peer", "unit", "ratio", "goal", "met", "note"):
        table.add_column(column, justify="right" if column in ("ours", "peer", "ratio") else "left")
    for row in rows:
        cells = (row.name, row.ours, row.peer, row.unit, row.ratio, row.goal)
        shown = ("" if cell is None else str(cell) for cell in cells)
        table.add_row(*shown, "yes" if row.met else "[bold red]no", row.note)
    console = Console()
    Console(width=max(console.width, 160)).print(table)
