"""One plugin: its manifest, options and hooks, the checks of its hooks, and its import time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.plugin_api.legacy_flags import LegacyFlag
from ascend_run.registry.discovery import Candidate
from ascend_run.registry.hooks import hook_problems
from ascend_run.registry.kinds import Plugin
from ascend_run.testing.option_docs import OptionDoc, option_docs

from .import_time import ImportTime, import_time
from .listing import Listed, described


@attrs.frozen(kw_only=True)
class Shown:
    """All that is known of a plugin that was imported."""

    listed: Listed
    requires: tuple[str, ...]
    conflicts: Mapping[str, str]
    after: tuple[str, ...]
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    forward_links: Mapping[str, str]
    idle: str | None
    legacy_flags: tuple[LegacyFlag, ...]
    behaves_as: str
    source: str
    options: tuple[OptionDoc, ...]
    hooks: Mapping[str, str]
    """Hook -> its kind."""
    hook_problems: tuple[str, ...]
    """As KIT-HOOKS finds them: unknown hooks and arguments, repeated claims."""
    import_time: ImportTime | None
    """None if its module cannot be imported alone."""
    documentation: str


def shown_plugin(candidate: Candidate, plugin: Plugin) -> Shown:
    """Describe an imported plugin; imports it again in a new process to time it."""
    manifest = plugin.manifest
    implemented = implementations(plugin)
    return Shown(
        listed=described(candidate, plugin),
        requires=tuple(str(requirement) for requirement in manifest.requires),
        conflicts=dict(manifest.conflicts),
        after=manifest.after,
        inside=tuple(str(claim) for claim in manifest.inside),
        outside=tuple(str(claim) for claim in manifest.outside),
        forward_links={kind: str(place) for kind, place in manifest.forward_links.items()},
        idle=None if manifest.idle is None else str(manifest.idle),
        legacy_flags=manifest.legacy_flags,
        behaves_as=manifest.behaves_as,
        source=manifest.source,
        options=tuple(option_docs(getattr(plugin, "config_class", None))),
        hooks={name: str(p.kind) for name, p in hook_points().items() if name in implemented},
        hook_problems=tuple(hook_problems(plugin)),
        import_time=import_time(plugin.__module__),
        documentation=inspect.getdoc(plugin) or "",
    )


def shown_values(shown: Shown) -> dict[str, Any]:
    """Return a plugin as JSON values."""
    more = attrs.asdict(shown, filter=lambda field, value: field.name != "listed")
    flags = [_translation(flag) for flag in shown.legacy_flags]
    return shown.listed._asdict() | more | {"legacy_flags": flags}


def _translation(flag: LegacyFlag) -> dict[str, object]:
    values = None if flag.values is None else [[word, value] for word, value in flag.values.items()]
    return attrs.asdict(flag) | {"values": values, "shown": str(flag)}


def show_page(shown: Shown) -> Iterator[str]:
    """Yield the lines of a plugin's page."""
    listed = shown.listed
    yield f"{listed.name}: {listed.summary}"
    yield ""
    yield from (f"  {line}".rstrip() for line in shown.documentation.splitlines())
    yield ""
    yield from (f"  {label:<11} {value}" for label, value in _facts(shown).items() if value)
    if shown.hook_problems:
        yield ""
        yield "  problems of its hooks:"
    yield from (f"    {problem}" for problem in shown.hook_problems)
    if shown.options:
        yield ""
        yield f"  options, set by plugins.{listed.name}.<name>=<value>:"
    for option in shown.options:
        yield f"    {option.name}: {option.type} = {option.default}"
        if option.help:
            yield f"        {option.help}"


def _facts(shown: Shown) -> dict[str, str]:
    listed = shown.listed
    flags = dict.fromkeys(str(flag) for flag in shown.legacy_flags)
    platforms = (listed.platforms or {}).items()
    return {
        "kind": listed.kind,
        "from": f"{listed.distribution} {listed.version} ({listed.value})",
        "aliases": ", ".join(listed.aliases),
        "maturity": str(listed.maturity),
        "numerics": str(listed.numerics),
        "level": str(listed.level),
        "platforms": ", ".join(f"{name} ({how})" for name, how in platforms),
        "behaves as": shown.behaves_as,
        "claims": ", ".join(listed.claims or ()),
        "requires": ", ".join(shown.requires),
        "conflicts": "; ".join(f"{name}: {why}" for name, why in shown.conflicts.items()),
        "after": ", ".join(shown.after),
        "inside": ", ".join(shown.inside),
        "outside": ", ".join(shown.outside),
        "links": ", ".join(f"{kind} ({place})" for kind, place in shown.forward_links.items()),
        "idle when": shown.idle or "",
        "legacy flags": ", ".join(flags),
        "source": shown.source,
        "plugin API": str(listed.requires_api),
        "hooks": ", ".join(f"{hook} ({kind})" for hook, kind in shown.hooks.items()),
        "hook checks": "passed" if shown.hooks and not shown.hook_problems else "",
        "import": "fails alone" if shown.import_time is None else str(shown.import_time),
    }
