"""Write docs/compatibility.md: which features can run together, and on which platforms.

python scripts/compatibility.py            # writes the page
python scripts/compatibility.py --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path, PurePath

import click

from ascend_run.plugin_api import Condition, Support
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind, Plugin, kind_of
from ascend_run.registry.pairs import exclusion

PAGE = Path(__file__).parent.parent / "docs/compatibility.md"

_HEAD = """\
# Compatibility

    ascend-run plan --enable ulysses,gmm --config run.toml     # can this run start? if not, why?
    ascend-run verify --enable ulysses,gmm --config run.toml   # does it compute the same without?

Before you enable features together, look them up here, or let `plan` check your run: it names each
pair that excludes one another, with the reason and the alternative. `scripts/compatibility.py`
generates this page from the manifests: which built-in features run together, and on which
platform. The [campaign](campaigns.md) `together` runs every allowed pair of the features that
existed at its last full run, and the test suite a sample of all features, and compares it with the
run without them; a feature that changes the model by design (its page says `Numerics: model`) is
enabled on both sides.

Conditions on settings (sizes that must divide, options that exclude each other) are on each
plugin's page, and are checked before anything starts.
"""


def page(
    features: Sequence[Plugin], platforms: Sequence[Plugin], others: Sequence[Plugin] = ()
) -> str:
    """Return the page as text.

    Args:
        features: In the order of the rows.
        others: Tasks and model families.
    """
    lines = [
        *_HEAD.splitlines(),
        "",
        "## Features together",
        "",
        *_matrix(features),
        "",
        *_exclusions(features, [*others, *platforms]),
        *_requirements(features),
        "## Features on platforms",
        "",
        *_platforms(features, platforms),
    ]
    return "\n".join(lines) + "\n"


def _matrix(features: Sequence[Plugin]) -> Iterator[str]:
    names = [feature.manifest.name for feature in features]
    yield _row("", names)
    yield _row("---", ["---"] * len(names))
    for feature in features:
        cells = [
            "" if other is feature else ("no" if exclusion(feature, other) else "yes")
            for other in features
        ]
        yield _row(f"[{feature.manifest.name}]({_page_of(feature)})", cells)


def _page_of(feature: Plugin) -> str:
    """Path of a plugin's page relative to docs; it is in the same group as the plugin's module."""
    group = PurePath(*feature.__module__.split(".")[2:-1])
    return str("plugins" / group / f"{feature.manifest.name}.md")


def _exclusions(features: Sequence[Plugin], others: Sequence[Plugin]) -> Iterator[str]:
    """Incompatible pairs of features, then of a feature and a task or a model family."""
    beside = [*combinations(features, 2), *product(features, others)]
    pairs = [(*pair, exclusion(*pair)) for pair in beside]
    forbidden = [(first, second, why) for first, second, why in pairs if why]
    if not forbidden:
        return
    yield "Excluded pairs, with the reason and the alternative:"
    yield ""
    for first, second, why in forbidden:
        yield f"- **{first.manifest.name}** and **{second.manifest.name}**: {why}."
    yield ""


def _requirements(features: Sequence[Plugin]) -> Iterator[str]:
    needs = [
        (feature.manifest.name, requirement)
        for feature in features
        for requirement in feature.manifest.requires
    ]
    if not needs:
        return
    yield "## What features require"
    yield ""
    for name, requirement in needs:
        if isinstance(requirement, Condition):
            notes = "".join(f"; {note}" for note in (requirement.why, requirement.fix) if note)
            yield f"- **{name}**: `{requirement}`{notes}."
        else:
            yield f"- **{name}**: the plugin **{requirement}**."
    yield ""


def _platforms(features: Sequence[Plugin], platforms: Sequence[Plugin]) -> Iterator[str]:
    names = sorted(platform.manifest.name for platform in platforms)
    yield _row("", names)
    yield _row("---", ["---"] * len(names))
    for feature in features:
        supported = feature.manifest.platforms
        cells = [str(supported.get(name, Support.REFUSED)) for name in names]
        yield _row(feature.manifest.name, cells)


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |".replace("|  |", "| |")


def installed() -> tuple[list[Plugin], list[Plugin], list[Plugin]]:
    """Return the built-in features; platforms; tasks and model families; sorted by name."""
    catalogue = discover()
    loaded = catalogue.load(name for name, found in catalogue.items() if found.first_party)
    ours = {plugin.manifest.name: plugin for plugin in loaded.values()}
    kinds = ((Kind.FEATURE,), (Kind.PLATFORM,), (Kind.TASK, Kind.MODEL))
    return tuple(
        [ours[name] for name in sorted(ours) if kind_of(ours[name]) in wanted] for wanted in kinds
    )  # type: ignore[return-value]


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
@click.argument("target", type=click.Path(path_type=Path), default=PAGE)
def command(check: bool, target: Path) -> None:
    """Write the page of compatibility."""
    new = page(*installed())
    if check:
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        if new != old:
            click.echo(f"{target} is out of date; run scripts/compatibility.py", err=True)
        sys.exit(int(new != old))
    target.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    command()
