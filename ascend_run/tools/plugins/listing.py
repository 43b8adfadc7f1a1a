"""The list of plugins, as data, as a table for the terminal, and as Markdown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ascend_run.tools.terminal.tables import table

if TYPE_CHECKING:
    from ascend_run.registry.discovery import Candidate, Catalogue
    from ascend_run.registry.kinds import Plugin

LEGEND: Final = (
    "platforms: ~ emulated there; without its device: = verified by arithmetic, : by schema, "
    "? not verified"
)
_MARKS: Final = {"real": "", "emulated": "~", "arithmetic": "=", "schema": ":", "unverified": "?"}
_HEADER: Final = ("name", "kind", "summary", "numerics", "maturity", "platforms", "from")


class Listed(NamedTuple):
    """One plugin of the list.

    Fields that its distribution does not declare in a static manifest are None: its code is not
    imported.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    distribution: str
    version: str
    value: str
    """``package.module:Class``."""
    first_party: bool
    category: str
    """For a built-in plugin, its group of plugins, such as ``sequence``."""
    summary: str | None = None
    requires_api: str | None = None
    level: int | None = None
    numerics: str | None = None
    maturity: str | None = None
    platforms: Mapping[str, str] | None = None
    claims: tuple[str, ...] | None = None
    broken: str | None = None
    """Why it cannot be used, as far as it is known without importing third-party code."""


def listing(catalogue: Catalogue) -> list[Listed]:
    """Return all plugins, with what their static manifests declare; imports none of them.

    A built-in plugin without one is imported: the metadata of an editable installation may be
    older than the code.
    """
    aliases = _declared_aliases(catalogue)
    rows: list[Listed] = []
    undeclared: list[Candidate] = []
    for candidate in catalogue.values():
        if candidate.manifest_file:
            rows.append(_declared(candidate, aliases[_class_of(candidate)]))
        elif _class_of(candidate) not in aliases:
            undeclared.append(candidate)
    rows += _imported(catalogue, [c.name for c in undeclared if c.first_party])
    rows += [_unread(candidate) for candidate in undeclared if not candidate.first_party]
    rows.sort(key=lambda row: row.name)
    for name, shadows in catalogue.shadows.items():
        reason = f"'{name}' is a plugin of ascend-run; the one of"
        rows += [
            _unread(other, broken=f"{reason} {other.offered_by} ({other.value}) cannot be used")
            for other in shadows
        ]
    for name, reason in catalogue.broken.items():
        offers = catalogue.duplicates[name]
        rows += [_unread(offer, broken=f"'{name}' {reason}") for offer in offers]
    return rows


def described(candidate: Candidate, plugin: Plugin) -> Listed:
    """Return the data of an imported plugin."""
    from ascend_run.registry.static_manifest import StaticManifest

    manifest = plugin.manifest
    names = {"name": manifest.name, "aliases": manifest.aliases}
    return _unread(candidate)._replace(**names, **StaticManifest.of(plugin)._asdict())


def _imported(catalogue: Catalogue, names: Sequence[str]) -> list[Listed]:
    """Import built-in plugins and return their data, without their aliases."""
    if not names:
        return []
    loaded = catalogue.load_each(names)
    broken = [_unread(catalogue[n], broken=str(error)) for n, error in loaded.failures.items()]
    classes = loaded.classes.items()
    return broken + [described(catalogue[n], p) for n, p in classes if n == p.manifest.name]


def _declared_aliases(catalogue: Catalogue) -> Mapping[tuple[str, str], Sequence[str]]:
    """Return the names without a static manifest of each class that has one under another name."""
    declared = {_class_of(c): list[str]() for c in catalogue.values() if c.manifest_file}
    for name, candidate in catalogue.items():
        if not candidate.manifest_file and _class_of(candidate) in declared:
            declared[_class_of(candidate)].append(name)
    return declared


def _class_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.distribution, candidate.value


def _declared(candidate: Candidate, aliases: Sequence[str]) -> Listed:
    """Return the data of a plugin with a static manifest; does not import it."""
    from ascend_run.registry.static_manifest import static_manifest

    declared, problem = static_manifest(candidate)
    if declared is None:
        return _unread(candidate, broken=problem)
    return _unread(candidate)._replace(aliases=tuple(aliases), **declared._asdict())


def _unread(candidate: Candidate, broken: str | None = None) -> Listed:
    return Listed(
        name=candidate.name,
        aliases=(),
        kind=str(candidate.kind),
        distribution=candidate.distribution,
        version=candidate.version,
        value=candidate.value,
        first_party=candidate.first_party,
        category=candidate.category,
        broken=broken,
    )


def list_page(rows: Sequence[Listed], unreadable: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the list.

    Args:
        unreadable: Distributions whose metadata cannot be read -> why.
    """
    usable = [row for row in rows if row.broken is None]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    yield from table(_HEADER, [_cells(row) for row in usable], width=width, flexible=2)
    yield ""
    yield LEGEND
    if any(row.platforms is None for row in usable):
        yield "'-': not declared; ascend-run plugins show NAME imports it and shows its manifest"
    problems = dict.fromkeys(row.broken for row in rows if row.broken is not None)
    if problems or unreadable:
        yield ""
        yield "broken (affects only runs that use them):"
        yield from (f"  {problem}" for problem in problems)
        yield from (f"  {place}: {reason}" for place, reason in unreadable.items())


def markdown_table(rows: Sequence[Listed]) -> str:
    """Return the built-in plugins as a Markdown table; each name links to its page."""
    lines = ["| plugin | group | what it does | numerics | platforms |", "|---|---|---|---|---|"]
    ours = [row for row in rows if row.first_party and row.broken is None]
    for row in sorted(ours, key=lambda row: (row.category, row.name)):
        link = f"[{row.name}](docs/plugins/{row.category}/{row.name}.md)"
        group = row.category.replace("_", "-")
        cells = (link, group, row.summary, row.numerics, _platforms(row))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + f"\n\n{LEGEND}\n"


def _cells(row: Listed) -> tuple[str, ...]:
    names, source = ", ".join((row.name, *row.aliases)), f"{row.distribution} {row.version}"
    known = (row.summary, row.numerics, row.maturity, _platforms(row))
    return names, row.kind, *("-" if cell is None else cell for cell in known), source


def _platforms(row: Listed) -> str | None:
    if row.platforms is None:
        return None
    return " ".join(f"{name}{_MARKS[how]}" for name, how in row.platforms.items() if how in _MARKS)
