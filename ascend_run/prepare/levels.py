"""``--level N``: select our own features up to a level that can run in this run. No torch.

A level makes no choice that is the user's. It leaves out, with the reason, a plugin that changes
the model's result, a plugin that has no effect in this run, and both of two that exclude each
other. Features enabled by name are kept at any level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import attrs

from ascend_run.plugin_api.errors import PluginResolutionError
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.kinds import Kind, Plugin
from ascend_run.registry.pairs import exclusion
from ascend_run.types.declarations import Numerics

from .config.raw import COMMAND_LINE, RawConfig
from .plan.explanation import BY_NAME
from .plan.records import Bundle, Plan


@attrs.frozen(kw_only=True)
class Trial:
    """Result of checking a run with some features."""

    problems: frozenset[str]
    """Why it cannot start; empty if it can."""
    idle: Mapping[str, str] = attrs.field(factory=dict)
    """Maps features without effect to the reason; empty if unknown."""


Try: TypeAlias = Callable[[Sequence[str]], Trial]
"""Checks a run with these features; its other settings are the user's."""


def with_level(plan: Plan, bundle: Bundle) -> Plan:
    """Return the plan of a run with the level's result and the reason for each member."""
    why = f"a member of --level {bundle.level}"
    plugins = tuple(
        attrs.evolve(p, why=p.why.replace(BY_NAME, why)) if p.name in bundle.members else p
        for p in plan.plugins
    )
    return attrs.evolve(plan, plugins=plugins, level=bundle)


def choose_members(
    level: int, enabled: Sequence[str], disabled: Iterable[str], catalogue: Catalogue, attempt: Try
) -> Bundle:
    """Select the members of a level for one run, independent of the order of names.

    Args:
        enabled: Features that the user named, canonical or not.
        disabled: Features that the user wants to leave out.
    """
    classes, left_out = _ours(catalogue)
    named = {plugin.manifest.name for plugin in catalogue.load_each(enabled).classes.values()}
    off = {plugin.manifest.name for plugin in catalogue.load_each(disabled).classes.values()}
    wanted = sorted(
        name for name, p in classes.items() if p.manifest.level <= level and name not in named
    )
    left_out |= {name: "disabled by name" for name in wanted if name in off}
    for name in wanted:
        if name not in left_out and classes[name].manifest.numerics is Numerics.MODEL:
            left_out[name] = "it changes the model's result; name it with --enable if you want that"
    candidates = [name for name in wanted if name not in left_out]
    accepted, reasons = _accepted(candidates, enabled, attempt)
    exclusive = _exclusive(accepted, classes)
    accepted = [name for name in accepted if name not in exclusive]
    # A member that requires another one can be checked once that one is enabled.
    while retried := _accepted(
        [name for name in candidates if name not in accepted and name not in exclusive],
        [*enabled, *accepted],
        attempt,
    )[0]:
        accepted += retried
    refused = {n: why for n, why in reasons.items() if n not in accepted}
    return Bundle(
        level=level,
        members=tuple(sorted(accepted)),
        left_out=dict(sorted({**left_out, **refused, **exclusive}.items())),
    )


def _ours(catalogue: Catalogue) -> tuple[dict[str, Plugin], dict[str, str]]:
    """Return our own features by canonical name, and load errors by name.

    Third-party plugins are not imported: levels apply to our own features only.
    """
    loaded = catalogue.load_each(
        name for name, c in catalogue.items() if c.first_party and c.kind is Kind.FEATURE
    )
    classes = {plugin.manifest.name: plugin for plugin in loaded.classes.values()}
    return classes, {name: str(error) for name, error in loaded.failures.items()}


def _accepted(
    candidates: Sequence[str], beside: Sequence[str], attempt: Try
) -> tuple[list[str], dict[str, str]]:
    """Return candidates that add no problem on their own, and why the others are left out."""
    before = attempt(beside).problems if candidates else frozenset()
    accepted, reasons = [], {}
    for name in candidates:
        after = attempt([*beside, name])
        if added := after.problems - before:
            reasons[name] = "; ".join(sorted(added))
        elif name in after.idle:
            reasons[name] = f"it changes nothing in this run, as {after.idle[name]}"
        else:
            accepted.append(name)
    return accepted, reasons


def _exclusive(names: Sequence[str], classes: Mapping[str, Plugin]) -> dict[str, str]:
    """Return the members that exclude each other, with reasons; none of them is enabled."""
    reasons: dict[str, list[str]] = {}
    for first, second in combinations(names, 2):
        if why := exclusion(classes[first], classes[second]):
            reasons.setdefault(first, []).append(why)
            reasons.setdefault(second, []).append(why)
    return {
        name: f"{'; '.join(why)}; enable one of them with --enable" for name, why in reasons.items()
    }


def without_disabled(raw: RawConfig, catalogue: Catalogue) -> list[str]:
    """Return the features that are enabled by name and not disabled; disabling overrides the file.

    Raises:
        PluginResolutionError: No distribution provides a disabled feature, or the command line also
            enables it.
    """
    loaded = catalogue.load_each(raw.disable)
    problems = [str(error) for error in loaded.failures.values()]
    disabled = {plugin.manifest.name for plugin in loaded.classes.values()}
    enabled = catalogue.load_each(raw.enable).classes
    kept = [n for n in raw.enable if n not in enabled or enabled[n].manifest.name not in disabled]
    if raw.enable_origin == COMMAND_LINE:
        problems += [
            f"'{name}' is both enabled and disabled on the command line; leave out one of the two"
            for name in raw.enable
            if name not in kept
        ]
    if problems:
        raise PluginResolutionError("cannot enable this set", problems)
    return kept
