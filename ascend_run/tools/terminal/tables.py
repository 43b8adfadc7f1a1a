"""Plain tables for a terminal, without rich, whose import is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_GAP = "  "


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    flexible: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    Args:
        width: Width of the terminal; None: no wrapping.
        flexible: Column that is wrapped if the table is wider than the terminal.
    """
    everything = [header, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    if width is not None and flexible is not None:
        others = sum(widths) - widths[flexible] + len(_GAP) * (len(header) - 1)
        narrowest = max(len(header[flexible]), 16)
        widths[flexible] = min(widths[flexible], max(width - others, narrowest))
    yield from _lines(header, widths, flexible)
    yield _GAP.join("-" * column for column in widths)
    for row in rows:
        yield from _lines(row, widths, flexible)


def _lines(row: Sequence[str], widths: Sequence[int], flexible: int | None) -> Iterator[str]:
    cells = [
        _wrapped(cell, widths[column]) if column == flexible else [cell]
        for column, cell in enumerate(row)
    ]
    for number in range(max(len(cell) for cell in cells)):
        line = (
            (cell[number] if number < len(cell) else "").ljust(width)
            for cell, width in zip(cells, widths, strict=True)
        )
        yield _GAP.join(line).rstrip()


def _wrapped(cell: str, width: int) -> list[str]:
    if len(cell) <= width and cell.isprintable():
        return [cell]
    import textwrap  # late: few cells are wrapped

    return textwrap.wrap(cell, width) or [""]
