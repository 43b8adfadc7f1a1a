"""Write the table of plugins into README.md, between its two markers.

python tools/plugin_table.py            # writes
python tools/plugin_table.py --check    # exits 1 where the table is not the one in the file
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ascend_run.entrypoints.plugins import listing, markdown_table
from ascend_run.registry.discovery import discover

BEGIN = "<!-- plugins:begin -->"
END = "<!-- plugins:end -->"
README = Path(__file__).parent.parent / "README.md"


def with_table(text: str, table: str) -> str:
    """A README with the table in its place; at its end where it has no markers yet.

    Raises:
        ValueError: It has one marker without the other, or one of them twice.
    """
    block = f"{BEGIN}\n{table}{END}\n"
    if BEGIN not in text and END not in text:
        return f"{text.rstrip()}\n\n## Plugins\n\n{block}"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end or BEGIN in rest or END in after or END in before:
        raise ValueError(f"expected {BEGIN} once and {END} on a line once, in this order")
    return f"{before}{block}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the table is old.")
@click.argument("readme", type=click.Path(path_type=Path, exists=True), default=README)
def command(check: bool, readme: Path) -> None:
    """Write the table of plugins into a README."""
    old = readme.read_text(encoding="utf-8")
    new = with_table(old, markdown_table(listing(discover())))
    if check:
        if new != old:
            click.echo(
                f"{readme}: the table of plugins is old; run tools/plugin_table.py", err=True
            )
        sys.exit(int(new != old))
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    command()
