"""Draw the layers of the package: a picture, and the table in docs/architecture.md.

python -m scripts.package_layers            # writes
python -m scripts.package_layers --check    # exits 1 if layers or arrows differ from the page

A layer is a package under ``ascend_run``; an arrow, the imports from one to another, each pair of
files counted once. All of it is measured from the imports.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import click

from scripts.import_graph import imported_files, read_modules
from scripts.marked_pages import between

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = "docs/architecture.md"
PICTURE: Final = "docs/images/package-layers.svg"
BEGIN, END = "<!-- package-layers:begin -->", "<!-- package-layers:end -->"
LEVELS: Final = (
    ("entrypoints",),
    ("tools",),
    ("testing",),
    ("prepare", "launch"),
    ("core", "registry", "plugins"),
    ("families", "text", "ops"),
    ("plugin_api", "reference"),
    ("types",),
)
"""From top to bottom; imports only point down. Each package is on one level."""
WIDTH, HEIGHT, GAP, MARGIN = 170, 46, 40, 20
COLUMN: Final = {
    "registry": 0,
    "launch": 2,
    "plugins": 3,
    "families": 1,
    "text": 2,
    "ops": 3,
    "reference": 3,
}
"""Where a layer does not stand in the middle column, 1."""


_COLOURS: Final = 'fill="#eef4fa" stroke="#2a78b8"'


@attrs.frozen
class PackageLayers:
    """What was measured."""

    lines: Mapping[str, int]
    imports: Mapping[tuple[str, str], int]

    @classmethod
    def measure(cls, root: Path) -> PackageLayers:
        """Read the package's files.

        Raises:
            ClickException: A package is on no level.
        """
        modules = read_modules(root, ["ascend_run"])
        lines: Counter[str] = Counter()
        for file, module in modules.items():
            lines[_layer(file)] += module.num_lines
        imports = Counter(
            (_layer(file), _layer(other))
            for file, others in imported_files(modules).items()
            for other in others
            if _layer(file) != _layer(other)
        )
        layers = {layer for level in LEVELS for layer in level}
        if unknown := {layer for layer in lines if not layer.endswith(".py")} - layers:
            named = ", ".join(sorted(unknown))
            raise click.ClickException(f"{named}: on no level of package_layers.py; see LEVELS")
        return cls(
            {layer: lines[layer] for layer in layers},
            {pair: n for pair, n in imports.items() if layers.issuperset(pair)},
        )


def _layer(file: str) -> str:
    return file.split("/")[1]


def table(layers: PackageLayers) -> str:
    """A row a layer, from the top down."""
    rows = ["| layer | lines | imports from |", "|---|---|---|"]
    for layer in (layer for level in LEVELS for layer in level):
        below = {to: n for (source, to), n in layers.imports.items() if source == layer}
        shown = ", ".join(
            f"{to} ({below[to]})" for to in sorted(below, key=lambda to: (-below[to], to))
        )
        rows.append(f"| `{layer}` | {layers.lines[layer]:,} | {shown or '-'} |")
    return "\n".join(rows)


def picture(layers: PackageLayers) -> str:
    """The same as a drawing; an arrow is as wide as its count is large."""
    boxes = dict(_boxes())
    width = max(x for x, _ in boxes.values()) + WIDTH + MARGIN
    height = max(y for _, y in boxes.values()) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 13px sans-serif; text-anchor: middle}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for (source, target), count in sorted(layers.imports.items()):
        parts += _arrow(boxes[source], boxes[target], count)
    for layer, (x, y) in boxes.items():
        middle = x + WIDTH / 2
        parts += [
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" {_COLOURS}/>',
            f'<text x="{middle}" y="{y + 20}" fill="#111111">{layer}</text>',
            f'<text x="{middle}" y="{y + 37}" fill="#555555">{layers.lines[layer]:,} lines</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _boxes() -> Iterator[tuple[str, tuple[int, int]]]:
    """Layer -> its left upper corner."""
    for number, level in enumerate(LEVELS):
        for layer in level:
            column = COLUMN.get(layer, 1)
            yield layer, (MARGIN + column * (WIDTH + GAP), MARGIN + number * (HEIGHT + GAP))


def _arrow(source: tuple[int, int], target: tuple[int, int], count: int) -> Iterator[str]:
    x1, y1 = source[0] + WIDTH / 2, source[1] + HEIGHT
    x2, y2 = target[0] + WIDTH / 2, target[1]
    if x1 == x2 and y2 - y1 > GAP:  # past the layers between
        side = x1 - WIDTH / 2 - GAP / 2
        path = f"M{x1 - 60} {y1} C{side} {y1 + 40} {side} {y2 - 40} {x2 - 60} {y2}"
    else:
        path = f"M{x1} {y1} L{x2} {y2}"
    stroke = min(5.0, 0.8 + count / 60)
    yield f'<path d="{path}" stroke="#9db8d0" stroke-width="{stroke:.1f}" fill="none"/>'


def arrows(text: str) -> dict[str, set[str]]:
    """Layer -> the layers that it imports from, of a table; the counts change with every commit."""
    rows = re.findall(r"^\| `(\w+)` \| [\d,]+ \| (.*) \|$", text, re.MULTILINE)
    return {layer: set(re.findall(r"(\w+) \(\d+\)", told)) for layer, told in rows}


def with_table(page: str, text: str) -> str:
    """Insert the table into a page between its markers.

    Raises:
        ValueError: The page has no markers.
    """
    return between(page, BEGIN, END, text)


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
@click.option("--root", default=ROOT, type=click.Path(path_type=Path), help="The project's folder.")
def command(check: bool, root: Path) -> None:
    """Draw the layers."""
    layers, page = PackageLayers.measure(root), root / PAGE
    old = page.read_text(encoding="utf-8")
    if not check:
        page.write_text(with_table(old, table(layers)), encoding="utf-8")
        (root / PICTURE).write_text(picture(layers), encoding="utf-8")
    elif arrows(old) != arrows(table(layers)):
        click.echo(f"{PAGE} is old; run python -m scripts.package_layers", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
