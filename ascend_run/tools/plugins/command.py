"""The command line of ``ascend-run plugins``."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ascend_run.tools.terminal.run_options import plugin_names
from ascend_run.tools.terminal.tables import table

if TYPE_CHECKING:
    from ascend_run.plugin_api.legacy_flags import LegacyFlag
    from ascend_run.registry.discovery import Candidate, Catalogue
    from ascend_run.registry.kinds import Plugin

_MARKS = {"real": "", "emulated": "~", "arithmetic": "=", "schema": ":", "unverified": "?"}
_LEGEND = (
    "platforms: ~ emulated there; without its device: = verified by arithmetic, : by schema, "
    "? not verified"
)
_HEADER = ("name", "kind", "summary", "numerics", "maturity", "platforms", "from")


@click.group("plugins", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the built-in plugins as a Markdown table.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, markdown: bool) -> None:
    """List the plugins, or show one.

    Built-in plugins are listed with their manifests. For third-party plugins only name and version
    are shown, since their code is not imported unless you name them.
    """
    if ctx.invoked_subcommand is None:
        _print_list(as_json, markdown)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the built-in plugins as a Markdown table.")
def list_command(as_json: bool, markdown: bool) -> None:
    """List the plugins."""
    _print_list(as_json, markdown)


def _complete_name(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = plugin_names()
    return [CompletionItem(n, help=source) for n, source in found if n.startswith(incomplete)]


@command.command("show")
@click.argument("name", shell_complete=_complete_name)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(name: str, as_json: bool) -> None:
    """Show a plugin's manifest, options and hooks; imports it."""
    from ascend_run.registry.discovery import discover

    catalogue = discover()
    plugin = catalogue.load([name])[name]
    shown = _described(catalogue[name], plugin) | _details(plugin)
    click.echo(json.dumps(shown, indent=2) if as_json else "\n".join(_page(shown)))


def listing(catalogue: Catalogue) -> list[dict[str, object]]:
    """Return all plugins as data, the built-in ones with their manifests and aliases."""
    ours = [name for name, candidate in catalogue.items() if candidate.first_party]
    loaded = catalogue.load_each(ours)
    rows: list[dict[str, object]] = []
    for name, candidate in catalogue.items():
        plugin = loaded.classes.get(name)
        if plugin is None:
            failure = loaded.failures.get(name)
            rows.append(_outside(candidate) | {"broken": None if failure is None else str(failure)})
        elif name == plugin.manifest.name:
            rows.append(_described(candidate, plugin) | {"broken": None})
    for name, shadows in catalogue.shadows.items():
        reason = f"'{name}' is a plugin of ascend-run; the one of"
        rows += [
            _outside(other)
            | {"broken": f"{reason} {other.offered_by} ({other.value}) cannot be used"}
            for other in shadows
        ]
    for name, reason in catalogue.broken.items():
        offers = catalogue.duplicates[name]
        rows += [_outside(offer) | {"broken": f"'{name}' {reason}"} for offer in offers]
    return rows


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the built-in plugins as a Markdown table; each name links to its page."""
    lines = ["| plugin | group | what it does | numerics | platforms |", "|---|---|---|---|---|"]
    ours = [row for row in rows if row["first_party"] and row["broken"] is None]
    for row in sorted(ours, key=lambda row: (row["category"], row["name"])):
        group = row["category"]
        link = f"[{row['name']}](docs/plugins/{group}/{row['name']}.md)"
        cells = (link, group.replace("_", "-"), row["summary"], row["numerics"], _platforms(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{_LEGEND}\n"


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection, which takes a tenth of the time of a listing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _print_list(as_json: bool, markdown: bool) -> None:
    with _without_collections():
        from ascend_run.registry.discovery import discover

        catalogue = discover()
        rows = listing(catalogue)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif markdown:
        click.echo(markdown_table(rows), nl=False)
    else:
        click.echo("\n".join(_list_page(rows, catalogue.unreadable)))


def _list_page(
    rows: Sequence[Mapping[str, object]], unreadable: Mapping[str, str]
) -> Iterator[str]:
    usable = [row for row in rows if row["broken"] is None]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    yield from table(_HEADER, [_cells(row) for row in usable], width=width, flexible=2)
    yield ""
    yield _LEGEND
    if any("summary" not in row for row in usable):
        yield "'-': third-party; ascend-run plugins show NAME imports it and shows its manifest"
    problems = dict.fromkeys(row["broken"] for row in rows if row["broken"] is not None)
    if problems or unreadable:
        yield ""
        yield "broken (affects only runs that use them):"
        yield from (f"  {problem}" for problem in problems)
        yield from (f"  {place}: {reason}" for place, reason in unreadable.items())


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ", ".join((row["name"], *row.get("aliases", ())))
    source = f"{row['distribution']} {row['version']}"
    if "summary" not in row:
        return names, row["kind"], "-", "-", "-", "-", source
    own = (row["summary"], row["numerics"], row["maturity"], _platforms(row))
    return names, row["kind"], *own, source


def _platforms(row: Mapping[str, Any]) -> str:
    supported = row["platforms"].items()
    return " ".join(f"{name}{_MARKS[how]}" for name, how in supported if how in _MARKS)


def _outside(candidate: Candidate) -> dict[str, object]:
    """Data of a third-party plugin from metadata; does not import it."""
    return {
        "name": candidate.name,
        "kind": str(candidate.kind),
        "distribution": candidate.distribution,
        "version": candidate.version,
        "first_party": candidate.first_party,
        "value": candidate.value,
        "category": candidate.category,
    }


def _described(candidate: Candidate, plugin: Plugin) -> dict[str, object]:
    from ascend_run.plugin_api.implementations import claims_of

    manifest = plugin.manifest
    return _outside(candidate) | {
        "name": manifest.name,
        "aliases": [*manifest.aliases],
        "summary": manifest.summary,
        "numerics": str(manifest.numerics),
        "maturity": str(manifest.maturity),
        "level": manifest.level,
        "platforms": {name: str(how) for name, how in manifest.platforms.items()},
        "claims": [str(claim) for claim in claims_of(plugin)],
    }


def _translation(flag: LegacyFlag) -> dict[str, object]:
    import attrs

    values = None if flag.values is None else [[word, value] for word, value in flag.values.items()]
    return attrs.asdict(flag) | {"values": values, "shown": str(flag)}


def _details(plugin: Plugin) -> dict[str, object]:
    import inspect

    import attrs

    from ascend_run.plugin_api.hook_points import hook_points
    from ascend_run.plugin_api.implementations import implementations
    from ascend_run.registry.option_docs import option_docs

    manifest = plugin.manifest
    implemented = implementations(plugin)
    return {
        "requires": [str(requirement) for requirement in manifest.requires],
        "conflicts": dict(manifest.conflicts),
        "after": [*manifest.after],
        "inside": [*manifest.inside],
        "outside": [*manifest.outside],
        "forward_links": {kind: str(place) for kind, place in manifest.forward_links.items()},
        "idle": None if manifest.idle is None else str(manifest.idle),
        "legacy_flags": [_translation(flag) for flag in manifest.legacy_flags],
        "behaves_as": manifest.behaves_as,
        "source": manifest.source,
        "api_version": manifest.api_version,
        "options": [attrs.asdict(o) for o in option_docs(getattr(plugin, "config_class", None))],
        "hooks": {n: str(point.kind) for n, point in hook_points().items() if n in implemented},
        "documentation": inspect.getdoc(plugin) or "",
    }


def _page(shown: Mapping[str, Any]) -> Iterator[str]:
    yield f"{shown['name']}: {shown['summary']}"
    yield ""
    yield from (f"  {line}".rstrip() for line in shown["documentation"].splitlines())
    yield ""
    facts = {
        "kind": shown["kind"],
        "from": f"{shown['distribution']} {shown['version']} ({shown['value']})",
        "aliases": ", ".join(shown["aliases"]),
        "maturity": shown["maturity"],
        "numerics": shown["numerics"],
        "level": str(shown["level"]),
        "platforms": ", ".join(f"{name} ({how})" for name, how in shown["platforms"].items()),
        "behaves as": shown["behaves_as"],
        "claims": ", ".join(shown["claims"]),
        "requires": ", ".join(shown["requires"]),
        "conflicts": "; ".join(f"{name}: {why}" for name, why in shown["conflicts"].items()),
        "after": ", ".join(shown["after"]),
        "inside": ", ".join(shown["inside"]),
        "outside": ", ".join(shown["outside"]),
        "links": ", ".join(f"{kind} ({place})" for kind, place in shown["forward_links"].items()),
        "idle when": shown["idle"] or "",
        "legacy flags": ", ".join(dict.fromkeys(flag["shown"] for flag in shown["legacy_flags"])),
        "source": shown["source"],
        "plugin API": str(shown["api_version"]),
        "hooks": ", ".join(f"{hook} ({kind})" for hook, kind in shown["hooks"].items()),
    }
    yield from (f"  {label:<11} {value}" for label, value in facts.items() if value)
    if shown["options"]:
        yield ""
        yield f"  options, set by plugins.{shown['name']}.<name>=<value>:"
    for option in shown["options"]:
        yield f"    {option['name']}: {option['type']} = {option['default']}"
        if option["help"]:
            yield f"        {option['help']}"
