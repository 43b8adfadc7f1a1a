"""Write the table of docs/presets.md from the records of ``ascend-run preset``.

python -m scripts.preset_table            # writes
python -m scripts.preset_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ascend_run.tools.preset.presets import Preset, presets
from scripts.marked_pages import between, write_or_check

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
    return between(page, BEGIN, END, table())


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write the table."""
    new = with_table(PAGE.read_text(encoding="utf-8"))
    write_or_check(PAGE, new, "scripts.preset_table", check=check)


if __name__ == "__main__":
    command()
