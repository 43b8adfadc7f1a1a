"""Write the table of docs/presets.md from the records of ``ascend-run preset``.

python -m scripts.preset_table            # writes
python -m scripts.preset_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ascend_run.tools.preset.presets import Preset, presets

PAGE: Final = Path(__file__).parent.parent / "docs/presets.md"
BEGIN, END = "<!-- presets:begin -->", "<!-- presets:end -->"


def table() -> str:
    """Return what stands between the markers."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| preset | family | parameters | published | context | template |"
    yield "|---|---|---|---|---|---|"
    for preset in presets().values():
        yield f"| {' | '.join(_cells(preset))} |"


def _cells(preset: Preset) -> tuple[str, ...]:
    link = f"[{preset.family}](plugins/models/{preset.family}.md)"
    template = "" if preset.template is None else f"`{preset.template}`"
    context = f"{preset.context:,}"
    parameters = f"{preset.parameters:,}"
    return f"`{preset.name}`", link, parameters, preset.published, context, template


def with_table(page: str) -> str:
    """Insert the table into the page between its markers.

    Raises:
        ValueError: The page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write the table."""
    old = PAGE.read_text(encoding="utf-8")
    new = with_table(old)
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    elif old != new:
        click.echo(f"{PAGE.name} is out of date; run python -m scripts.preset_table", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
