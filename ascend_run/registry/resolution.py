"""Which plugins may run together, and in which order: pure, and blind to the order of naming."""

from __future__ import annotations

import graphlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import AscendRunError, Claim, Condition, Support

from .discovery import joint_refusal
from .kinds import CHOSEN_WITH, CLAIMS, Kind, Plugin, kind_of

_PLACES = list(Kind)


@attrs.frozen
class Resolution:
    """A set of plugins that may run together."""

    order: tuple[Plugin, ...]
    """Innermost first."""
    owners: Mapping[Claim, str]
    """Seam -> the plugin that owns it alone."""
    inner: Mapping[str, Mapping[str, str]]
    """Plugin -> each plugin it declares to be further in -> ``after`` or ``requires``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, innermost first."""
        return tuple(plugin.manifest.name for plugin in self.order)

    def of_kind(self, kind: Kind) -> tuple[str, ...]:
        """Canonical names of one kind, innermost first."""
        return tuple(p.manifest.name for p in self.order if kind_of(p.manifest) is kind)


def resolve(
    names: Sequence[str],
    classes: Mapping[str, Plugin],
    failures: Mapping[str, AscendRunError] | None = None,
) -> Resolution:
    """Order these plugins, or refuse the set.

    Args:
        names: Features, platform, task and family alike; aliases and repetitions are harmless.
        classes: Name (each as given) -> plugin.
        failures: Names that could not be loaded -> why; part of the one refusal.

    Raises:
        PluginLoadError: All that is wrong is that plugins could not be loaded.
        PluginResolutionError: Anything else; every problem is named at once.
    """
    failed = dict(failures or {})
    plugins = {classes[n].manifest.name: classes[n] for n in sorted({*names} - {*failed})}
    canonical = {alias: n for n, p in plugins.items() for alias in (n, *p.manifest.aliases)}
    inner = _declared_order(plugins, canonical)
    owners, problems = _claims(plugins)
    problems += _missing(plugins, canonical, failed)
    problems += _conflicts(plugins, canonical)
    problems += _refused_platforms(plugins)
    problems += _cycles(inner)
    if failed or problems:
        raise joint_refusal((failed[name] for name in sorted(failed)), problems)
    return Resolution(tuple(_sorted(plugins, inner)), owners, inner)


def check_conditions(resolution: Resolution, config: Any) -> list[str]:
    """Requirements on the run that do not hold, a sentence each.

    Args:
        config: The RunConfig.
    """
    problems: list[str] = []
    for plugin in resolution.order:
        for condition in plugin.manifest.requires:
            if isinstance(condition, Condition):
                problems += _unmet(plugin.manifest.name, condition, config)
    return problems


def _unmet(name: str, condition: Condition, config: Any) -> Iterator[str]:
    section, _, field = condition.field.partition(".")
    try:
        holds = condition.holds(config)
    except AttributeError:
        yield f"'{name}' has a condition on {condition.field}, which is no key of the config"
        return
    if not holds:
        seen = getattr(getattr(config, section), field)
        notes = "".join(f"; {note}" for note in (condition.why, condition.fix) if note)
        yield f"'{name}' requires {condition}, and it is {seen}{notes}"


def _declared_order(
    plugins: Mapping[str, Plugin], canonical: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    inner: dict[str, dict[str, str]] = {}
    for name, plugin in plugins.items():
        required = [other for other in plugin.manifest.requires if isinstance(other, str)]
        declared = [(o, "requires") for o in required] + [
            (o, "after") for o in plugin.manifest.after
        ]
        inner[name] = {canonical[other]: why for other, why in declared if other in canonical}
    return inner


def _claims(plugins: Mapping[str, Plugin]) -> tuple[dict[Claim, str], list[str]]:
    claimants: dict[Claim, list[str]] = {}
    for name, plugin in plugins.items():
        for claim in dict.fromkeys(plugin.manifest.claims):
            claimants.setdefault(claim, []).append(name)
    fixes = {claim: f"choose one with {CHOSEN_WITH[kind]}" for kind, claim in CLAIMS.items()}
    problems = [
        f"{_all_of(names)} claim '{claim}', which one plugin owns alone; "
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
    features = [n for n, p in plugins.items() if kind_of(p.manifest) is Kind.FEATURE]
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
                yield f"'{name}' cannot run beside '{canonical[other]}': {reason}"


def _refused_platforms(plugins: Mapping[str, Plugin]) -> Iterator[str]:
    platforms = [n for n, p in plugins.items() if kind_of(p.manifest) is Kind.PLATFORM]
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


def _cycles(inner: Mapping[str, Iterable[str]]) -> Iterator[str]:
    graph = {name: {*before} for name, before in inner.items()}
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            cycle: list[str] = error.args[1]
            yield (
                f"the declared order ends where it began: {' -> '.join(cycle)} (each is applied "
                "before the next); leave one of them out"
            )
            graph[cycle[1]].discard(cycle[0])  # go on, to find any other
        else:
            return


def _sorted(plugins: Mapping[str, Plugin], inner: Mapping[str, Iterable[str]]) -> Iterator[Plugin]:
    """Declared order first; whatever that leaves open, by kind and then by name."""
    sorter = graphlib.TopologicalSorter(inner)
    sorter.prepare()
    ready: list[tuple[int, str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (_PLACES.index(kind_of(plugins[name].manifest)), name))
        _, name = heapq.heappop(ready)
        yield plugins[name]
        sorter.done(name)


def _all_of(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    both = "both" if len(quoted) == 2 else "all"
    return f"{', '.join(quoted[:-1])} and {quoted[-1]} {both}"
