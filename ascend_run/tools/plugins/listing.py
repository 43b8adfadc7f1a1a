"""The list of plugins, as data, as a table for the terminal, and as Markdown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

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


@attrs.frozen(kw_only=True)
class Listed:
    """One plugin of the list.

    Fields with a default are None for a third-party plugin, whose code is not imported, except
    those that its distribution declares in a static manifest.
    """

    name: str
    aliases: tuple[str, ...] = ()
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
    """Return all plugins, the built-in ones with their manifests."""
    ours = [name for name, candidate in catalogue.items() if candidate.first_party]
    loaded = catalogue.load_each(ours)
    aliases = _declared_aliases(catalogue)
    rows: list[Listed] = []
    for name, candidate in catalogue.items():
        plugin = loaded.classes.get(name)
        if plugin is not None:
            rows += [described(candidate, plugin)] if name == plugin.manifest.name else []
        elif name in loaded.failures:
            rows.append(_unread(candidate, broken=str(loaded.failures[name])))
        elif candidate.manifest_file or _class_of(candidate) not in aliases:
            rows.append(_outside(candidate, aliases.get(_class_of(candidate), ())))
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
    from ascend_run.plugin_api.implementations import claims_of

    manifest = plugin.manifest
    return attrs.evolve(
        _unread(candidate),
        name=manifest.name,
        aliases=manifest.aliases,
        summary=manifest.summary,
        requires_api=manifest.requires_api,
        level=manifest.level,
        numerics=str(manifest.numerics),
        maturity=str(manifest.maturity),
        platforms={name: str(how) for name, how in manifest.platforms.items()},
        claims=tuple(str(claim) for claim in claims_of(plugin)),
    )


def _declared_aliases(catalogue: Catalogue) -> Mapping[tuple[str, str], Sequence[str]]:
    """Return the names without a static manifest of each class that has one under another name."""
    declared = {_class_of(c): list[str]() for c in catalogue.values() if c.manifest_file}
    for name, candidate in catalogue.items():
        if not candidate.manifest_file and _class_of(candidate) in declared:
            declared[_class_of(candidate)].append(name)
    return declared


def _class_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.distribution, candidate.value


def _outside(candidate: Candidate, aliases: Sequence[str]) -> Listed:
    """Return the data of a third-party plugin from metadata; does not import it."""
    from ascend_run.plugin_api.errors import PluginLoadError
    from ascend_run.registry.static_manifest import static_manifest

    try:
        declared = static_manifest(candidate)
    except PluginLoadError as error:
        return _unread(candidate, broken=str(error))
    if declared is None:
        return _unread(candidate)
    return attrs.evolve(_unread(candidate), aliases=tuple(aliases), **attrs.asdict(declared))


def _unread(candidate: Candidate, broken: str | None = None) -> Listed:
    return Listed(
        name=candidate.name,
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
        yield "'-': third-party; ascend-run plugins show NAME imports it and shows its manifest"
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
