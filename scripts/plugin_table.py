"""Write the table of plugins into README.md, between its two markers.

python scripts/plugin_table.py            # writes the table
python scripts/plugin_table.py --check    # exits with 1 if the table is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ascend_run.registry.discovery import discover
from ascend_run.tools.plugins.listing import listing, markdown_table

BEGIN = "<!-- plugins:begin -->"
END = "<!-- plugins:end -->"
README = Path(__file__).parent.parent / "README.md"


def with_table(text: str, table: str) -> str:
    """Insert the table into a README between its markers; append it if there are none.

    Raises:
        ValueError: A marker is missing or duplicate.
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
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the table is outdated.")
@click.argument("readme", type=click.Path(path_type=Path, exists=True), default=README)
def command(check: bool, readme: Path) -> None:
    """Write the table of plugins into a README."""
    old = readme.read_text(encoding="utf-8")
    new = with_table(old, markdown_table(listing(discover())))
    if check:
        if new != old:
            click.echo(
                f"{readme}: the table of plugins is out of date; run scripts/plugin_table.py",
                err=True,
            )
        sys.exit(int(new != old))
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    command()
