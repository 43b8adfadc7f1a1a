"""Write docs/platforms.md: every plugin of ours, on every platform, and how that is known.

python tools/platform_table.py            # writes
python tools/platform_table.py --check    # exits 1 where the page is old
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ascend_run.entrypoints.plugins import listing
from ascend_run.plugin_api import Support
from ascend_run.registry.discovery import discover

PAGE = Path(__file__).parent.parent / "docs/platforms.md"
HEAD = """# Platforms

What each plugin is known to do on each platform. `ascend-run plugins` shows the same, with a mark
behind the platform's name, and `ascend-run plugins --json` with the words of this page. How a claim
about a device that nobody here has seen comes to be is told on the page of [npu](plugins/npu.md).

"""


def meanings() -> Iterator[tuple[str, str]]:
    """State -> what it says, from the documentation below its name."""
    source = inspect.getsource(Support)
    for state in Support:
        match = re.search(rf'{state.name} = "[a-z]+"\n    """(.+?)"""', source, re.DOTALL)
        assert match is not None
        yield str(state), " ".join(match[1].split())


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    ours = [row for row in rows if row["first_party"] and row["broken"] is None]
    platforms = sorted({name for row in ours for name in row["platforms"]})
    lines = ["| state | what is known |", "|---|---|"]
    lines += [f"| {state} | {says} |" for state, says in meanings()]
    lines += [
        "",
        f"| plugin | kind | {' | '.join(platforms)} |",
        "|---|---|" + "---|" * len(platforms),
    ]
    for row in ours:
        states = (row["platforms"].get(name, str(Support.REFUSED)) for name in platforms)
        cells = (f"[{row['name']}](plugins/{row['name']}.md)", row["kind"], *states)
        lines.append(f"| {' | '.join(cells)} |")
    counts = {name: [row["platforms"].get(name, "refused") for row in ours] for name in platforms}
    lines.append("")
    for name, states in counts.items():
        number = {state: states.count(state) for state in dict.fromkeys(map(str, Support))}
        told = ", ".join(f"{count} {state}" for state, count in number.items() if count)
        lines.append(f"- {name}: {told}")
    return HEAD + "\n".join(lines) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page is old.")
@click.argument("target", type=click.Path(path_type=Path), default=PAGE)
def command(check: bool, target: Path) -> None:
    """Write the page of platforms."""
    new = page(listing(discover()))
    if not check:
        target.write_text(new, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != new:
        click.echo(f"{target}: the page is old; run tools/platform_table.py", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
