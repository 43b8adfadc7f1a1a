"""Resolve a set of plugins: whether they can run together, and in which order.

A pure function; the result does not depend on the order in which plugins are named.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import AscendRunError, Claim, Condition, Support
from ascend_run.plugin_api.error_text import listed
from ascend_run.plugin_api.implementations import claims_of

from .discovery import joint_refusal
from .kinds import CHOSEN_WITH, CLAIMS, Kind, Plugin, kind_of

if TYPE_CHECKING:
    from ascend_run.types.config import RunConfig

_KIND_ORDER = list(Kind)


@attrs.frozen
class Resolution:
    """A set of plugins that can run together."""

    order: tuple[Plugin, ...]  #: Innermost first.
    owners: Mapping[Claim, str]  #: Claim -> the plugin that owns it.
    inner: Mapping[str, Mapping[str, str]]
    """Plugin -> each plugin declared to be further in -> that declaration, as a sentence."""

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, innermost first."""
        return tuple(plugin.manifest.name for plugin in self.order)

    def of_kind(self, kind: Kind) -> tuple[str, ...]:
        """Canonical names of one kind, innermost first."""
        return tuple(p.manifest.name for p in self.order if kind_of(p) is kind)


def resolve(
    names: Sequence[str],
    classes: Mapping[str, Plugin],
    failures: Mapping[str, AscendRunError] | None = None,
) -> Resolution:
    """Order these plugins.

    Args:
        names: Features, platform, task and family; may contain aliases and duplicates.
        classes: Name (as in ``names``) -> plugin.
        failures: Names that could not be loaded -> why; included in the error.

    Raises:
        PluginLoadError: The only problem is that plugins could not be loaded.
        PluginResolutionError: The plugins cannot run together; lists all problems.
    """
    failed = dict(failures or {})
    plugins = {classes[n].manifest.name: classes[n] for n in sorted({*names} - {*failed})}
    canonical = {alias: n for n, p in plugins.items() for alias in (n, *p.manifest.aliases)}
    owners, problems = _claims(plugins)
    inner = _declared_order(plugins, canonical, owners)
    problems += _missing(plugins, canonical, failed)
    problems += _conflicts(plugins, canonical)
    problems += _refused_platforms(plugins)
    problems += _cycles(inner)
    if failed or problems:
        raise joint_refusal((failed[name] for name in sorted(failed)), problems)
    return Resolution(tuple(_sorted(plugins, inner)), owners, inner)


def check_conditions(resolution: Resolution, config: RunConfig) -> list[str]:
    """Return a message for each required condition that the config does not meet."""
    problems: list[str] = []
    for plugin in resolution.order:
        for condition in plugin.manifest.requires:
            if isinstance(condition, Condition):
                problems += _unmet(plugin.manifest.name, condition, config)
    return problems


def _unmet(name: str, condition: Condition, config: RunConfig) -> Iterator[str]:
    section, _, field = condition.field.partition(".")
    try:
        holds = condition.holds(config)
    except AttributeError:
        yield f"'{name}' has a condition on {condition.field}, which is not a config key"
        return
    if not holds:
        seen = getattr(getattr(config, section), field)
        notes = "".join(f"; {note}" for note in (condition.why, condition.fix) if note)
        yield f"'{name}' requires {condition}, but it is {seen}{notes}"


def _declared_order(
    plugins: Mapping[str, Plugin], canonical: Mapping[str, str], owners: Mapping[Claim, str]
) -> dict[str, dict[str, str]]:
    inner: dict[str, dict[str, str]] = {name: {} for name in plugins}
    for name, manifest in ((name, plugin.manifest) for name, plugin in plugins.items()):
        for side, claims in (("inside", manifest.inside), ("outside", manifest.outside)):
            for claim in claims:
                if (owner := owners.get(claim, name)) != name:
                    further_in, outer = (name, owner) if side == "inside" else (owner, name)
                    inner[outer][further_in] = (
                        f"{name} is declared to be {side} of {claim}, which {owner} owns"
                    )
        for other in manifest.requires:
            if isinstance(other, str) and other in canonical:
                inner[name][canonical[other]] = f"{name} requires {canonical[other]}"
        for other in manifest.after:
            if other in canonical:
                inner[name][canonical[other]] = f"{name} is declared to be after {canonical[other]}"
    return inner


def _claims(plugins: Mapping[str, Plugin]) -> tuple[dict[Claim, str], list[str]]:
    claimants: dict[Claim, list[str]] = {}
    for name, plugin in plugins.items():
        for claim in claims_of(plugin):
            claimants.setdefault(claim, []).append(name)
    fixes = {claim: f"choose one with {CHOSEN_WITH[kind]}" for kind, claim in CLAIMS.items()}
    problems = [
        f"{_all_of(names)} claim '{claim}', which only one plugin can own; "
        + fixes.get(claim, "enable one of them")
        for claim, names in claimants.items()
        if len(names) > 1
    ]
    return {claim: names[0] for claim, names in claimants.items()}, problems


def _missing(
    plugins: Mapping[str, Plugin], canonical: Mapping[str, str], failed: Mapping[str, object]
) -> Iterator[str]:
    lacking = [
        (name, other)
        for name, plugin in plugins.items()
        for other in plugin.manifest.requires
        if isinstance(other, str) and other not in canonical and other not in failed
    ]
    features = [n for n, p in plugins.items() if kind_of(p) is Kind.FEATURE]
    complete = ",".join(dict.fromkeys([*features, *(other for _, other in lacking)]))
    for name, other in lacking:
        yield f"'{name}' requires '{other}'; add it: --enable {complete}"


def _conflicts(plugins: Mapping[str, Plugin], canonical: Mapping[str, str]) -> Iterator[str]:
    seen: set[frozenset[str]] = set()
    for name, plugin in plugins.items():
        for other, reason in plugin.manifest.conflicts.items():
            pair = frozenset((name, canonical.get(other, name)))
            if len(pair) == 2 and pair not in seen:
                seen.add(pair)
                yield f"'{name}' cannot run with '{canonical[other]}': {reason}"


def _refused_platforms(plugins: Mapping[str, Plugin]) -> Iterator[str]:
    platforms = [n for n, p in plugins.items() if kind_of(p) is Kind.PLATFORM]
    for name, (other, plugin) in itertools.product(platforms, plugins.items()):
        supported = plugin.manifest.platforms
        alike = supported.get(plugins[name].manifest.behaves_as, Support.REFUSED)
        if other in platforms or supported.get(name, alike) is not Support.REFUSED:
            continue
        runs_on = ", ".join(p for p, how in supported.items() if how is not Support.REFUSED)
        yield (
            f"'{other}' does not run on platform '{name}'; it runs on: {runs_on or 'none'}; "
            "choose one with --platform or leave it out"
        )


def _cycles(inner: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    graph = {name: {*before} for name, before in inner.items()}
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            cycle: list[str] = error.args[1]
            why = "; ".join(inner[outer][name] for name, outer in itertools.pairwise(cycle))
            yield (
                f"the declared order has a cycle: {' -> '.join(cycle)} (each is applied before the "
                f"next: {why}); leave one of them out"
            )
            graph[cycle[1]].discard(cycle[0])  # continue, to find other cycles
        else:
            return


def _sorted(plugins: Mapping[str, Plugin], inner: Mapping[str, Iterable[str]]) -> Iterator[Plugin]:
    """In topological order; ties are broken by kind, then by name."""
    sorter = graphlib.TopologicalSorter(inner)
    sorter.prepare()
    ready: list[tuple[int, str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (_KIND_ORDER.index(kind_of(plugins[name])), name))
        _, name = heapq.heappop(ready)
        yield plugins[name]
        sorter.done(name)


def _all_of(names: Sequence[str]) -> str:
    quoted = listed([f"'{name}'" for name in names], "and")
    return f"{quoted} {'both' if len(names) == 2 else 'all'}"
