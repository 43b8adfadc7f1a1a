"""Write the tables of docs/data-handlers.md: data handlers with their schemas, chat templates.

python -m scripts.handler_table            # writes
python -m scripts.handler_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import click

from ascend_run.text.fields import FIELDS
from ascend_run.text.handlers import GROUP, DataHandler
from ascend_run.text.template_records import NAMED
from scripts.marked_pages import between, write_or_check

PAGE: Final = Path(__file__).parent.parent / "docs/data-handlers.md"
BEGIN, END = "<!-- handlers:begin -->", "<!-- handlers:end -->"


def handlers() -> list[DataHandler]:
    """Return the built-in handlers, by name."""
    points = (point for point in entry_points(group=GROUP) if point.dist is not None)
    own = {point.name: point for point in points if point.dist.name == "ascend-run"}
    return [own[name].load() for name in sorted(own)]


def schema(handler: DataHandler) -> str:
    """Return the schema of a handler, from its module's docstring."""
    text = sys.modules[handler.convert.__module__].__doc__ or ""
    shown = text.partition("\n\n")[2].strip("\n").replace("``", "`")
    # ruff moves a docstring to the left that has nothing but indented lines.
    return textwrap.indent(shown, "    ") if shown.startswith("{") else shown


def tables() -> str:
    """Return what stands between the markers."""
    return "\n".join((*_overview(), "", *_details(), *_templates()))


def _overview() -> Iterator[str]:
    yield "| handler | reads | sample | token files |"
    yield "|---|---|---|---|"
    for handler in handlers():
        fields = FIELDS.get(handler.sample, ())
        files = ", ".join(f"`{field}`" for field in fields) or "one pair, `PREFIX.bin` and `.idx`"
        link = f"[`{handler.name}`](#{handler.name})"
        yield f"| {link} | {handler.summary} | {handler.sample.__name__} | {files} |"


def _details() -> Iterator[str]:
    for handler in handlers():
        yield from (f"### {handler.name}", "", schema(handler), "")
        if handler.keys:
            yield from ("| key | meaning | in the file |", "|---|---|---|")
        for key in handler.keys:
            is_role = key.name.endswith("_tag") and key.default is None
            name = "" if is_role else f"`{key.default or key.name}`"
            needed = ", required" if key.required else ""
            yield f"| `{key.name}` | {key.meaning}{needed} | {name} |"
        if handler.keys:
            yield ""


def _templates() -> Iterator[str]:
    yield from ("## Named templates", "")
    yield f"{', '.join(f'`{name}`' for name in NAMED)}."


def with_tables(page: str) -> str:
    """Insert the tables into the page between its markers.

    Raises:
        ValueError: The page has no markers.
    """
    return between(page, BEGIN, END, tables())


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write the tables."""
    new = with_tables(PAGE.read_text(encoding="utf-8"))
    write_or_check(PAGE, new, "scripts.handler_table", check=check)


if __name__ == "__main__":
    command()
