"""Write docs/platforms.md: how well each built-in plugin is verified on each platform.

python scripts/platform_table.py            # writes the page
python scripts/platform_table.py --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ascend_run.plugin_api import Support
from ascend_run.registry.discovery import discover
from ascend_run.tools.plugins.listing import Listed, listing

PAGE = Path(__file__).parent.parent / "docs/platforms.md"
HEAD = """# Platforms

    ascend-run plugins

shows how each plugin is verified on each platform, by a mark after the platform's name;
`ascend-run plugins --json` uses the words of this page. [NPU verification](npu-proof.md) describes
the tests without a device.

"""


def meanings() -> Iterator[tuple[str, str]]:
    """Yield each state and its meaning, from the docstring below its name."""
    source = inspect.getsource(Support)
    for state in Support:
        match = re.search(rf'{state.name} = "[a-z]+"\n    """(.+?)"""', source, re.DOTALL)
        assert match is not None
        yield str(state), " ".join(match[1].split())


def page(rows: Sequence[Listed]) -> str:
    """Return the page as text."""
    ours = [row for row in rows if row.first_party and row.broken is None]
    verified = {row.name: row.platforms or {} for row in ours}
    platforms = sorted({name for states in verified.values() for name in states})
    lines = ["| state | verification |", "|---|---|"]
    lines += [f"| {state} | {says} |" for state, says in meanings()]
    lines += [
        "",
        f"| plugin | kind | {' | '.join(platforms)} |",
        "|---|---|" + "---|" * len(platforms),
    ]
    for row in ours:
        states = (verified[row.name].get(name, str(Support.REFUSED)) for name in platforms)
        page = f"plugins/{row.category}/{row.name}.md"
        cells = (f"[{row.name}]({page})", row.kind, *states)
        lines.append(f"| {' | '.join(cells)} |")
    counts = {
        name: [states.get(name, "refused") for states in verified.values()] for name in platforms
    }
    lines.append("")
    for name, found in counts.items():
        number = {state: found.count(state) for state in dict.fromkeys(map(str, Support))}
        described = ", ".join(f"{count} {state}" for state, count in number.items() if count)
        lines.append(f"- {name}: {described}")
    return HEAD + "\n".join(lines) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
@click.argument("target", type=click.Path(path_type=Path), default=PAGE)
def command(check: bool, target: Path) -> None:
    """Write the page of platforms."""
    new = page(listing(discover()))
    if not check:
        target.write_text(new, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != new:
        click.echo(f"{target} is out of date; run scripts/platform_table.py", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
