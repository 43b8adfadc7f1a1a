"""Explain why a set of plugins cannot run by minimal conflicts, and what can run. No torch.

A set is a conflict if it cannot run even with everything its members require. It is minimal if
every proper subset can run. Resolution decides whether a set can run, since it alone has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any, Final

import attrs

from ascend_run.plugin_api import AscendRunError, Manifest, PluginResolutionError, Support
from ascend_run.plugin_api.error_text import listed
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.kinds import CHOSEN_WITH, Kind, Plugin, kind_of
from ascend_run.registry.resolution import resolve

_MOST_NODES: Final = 4096
"""Limit of the hitting-set search; exceeded only if dozens of plugins exclude one another."""
_MOST_OFFERED: Final = 3

Names = frozenset[str]


@attrs.frozen(kw_only=True)
class Conflict:
    """A minimal set of plugins that cannot run together."""

    plugins: tuple[str, ...]
    why: str
    way_out: str

    @property
    def sentence(self) -> str:
        """Reason and fix as one line of an error message."""
        return f"{self.why}; {self.way_out}"


@attrs.frozen(kw_only=True)
class Conflicts:
    """All conflicts among the requested plugins."""

    found: tuple[Conflict, ...]
    can_run: tuple[tuple[str, ...], ...]
    """The largest sets of features that can run, with what they require.

    Empty if leaving out features is not enough.
    """

    explains: tuple[str, ...]
    """Messages of resolution that the conflicts replace."""

    def as_error(self, error: AscendRunError) -> PluginResolutionError:
        """Return the error with the conflicts in place of the messages they explain."""
        lines = [p for p in error.problems if p not in self.explains]
        lines += [conflict.sentence for conflict in self.found]
        if self.can_run:
            lines.append(f"the most that can run: {' or '.join(map(_enable, self.can_run))}")
        return PluginResolutionError(
            error.headline,
            lines,
            conflicts=[attrs.asdict(conflict) for conflict in self.found],
            can_run=self.can_run,
        )


def explained(error: AscendRunError, names: Iterable[str], catalogue: Catalogue) -> AscendRunError:
    """Return the error with the conflicts of these plugins; unchanged if there are none."""
    classes = _with_required(names, catalogue)
    found = find_conflicts(names, classes)
    return found.as_error(error) if found.found else error


def find_conflicts(names: Iterable[str], classes: Mapping[str, Plugin]) -> Conflicts:
    """Find every minimal conflict among the requested plugins.

    Args:
        names: Features, platform, task and family; names without a class are ignored.
        classes: Their classes by name and the classes of what they require, if available.
    """
    classes = {**_stubs(classes), **classes}
    plugins = {p.manifest.name: p for p in classes.values()}
    classes = {**plugins, **classes}  # adds canonical names of aliases
    asked = frozenset(classes[name].manifest.name for name in names if name in classes)

    def fails(subset: Names) -> bool:
        return bool(_problems(closure(subset, classes), plugins))

    if not fails(asked):
        return Conflicts(found=(), can_run=(), explains=())
    sets, hitting = minimal_failing_sets(asked, fails)
    features = {n for n in asked if kind_of(plugins[n]) is Kind.FEATURE}
    enough = sorted((h for h in hitting if h <= features), key=lambda h: (len(h), sorted(h)))
    offered = [h for h in enough if len(h) == len(enough[0])][:_MOST_OFFERED]
    return Conflicts(
        found=tuple(_conflict(subset, classes, plugins) for subset in sets),
        can_run=tuple(_features(asked - left_out, classes, plugins) for left_out in offered),
        explains=_problems(closure(asked, classes), plugins),
    )


def minimal_failing_sets(
    names: Names, fails: Callable[[Names], bool]
) -> tuple[list[Names], list[Names]]:
    """Find all minimal failing sets, and their hitting sets.

    Leaving out a hitting set makes the rest succeed; the smallest hitting sets are among those
    returned. Source of the search: Reiter 1987, A theory of diagnosis from first principles.

    Args:
        fails: Monotone predicate: every superset of a failing set must fail.
    """
    found: list[Names] = []
    for size in (1, 2):  # finds almost all conflicts without a search
        for chosen in combinations(sorted(names), size):
            subset = frozenset(chosen)
            if not any(known <= subset for known in found) and fails(subset):
                found.append(subset)
    hitting: list[Names] = []
    waiting: dict[Names, None] = {frozenset(): None}
    for left_out in islice(_growing(waiting), _MOST_NODES):
        rest = names - left_out
        known = next((c for c in found if c <= rest), None)
        if known is None and fails(rest):
            known = _shrunk(rest, fails)
            found.append(known)
        if known is None:
            hitting.append(left_out)
        else:
            waiting.update(dict.fromkeys(left_out | {name} for name in sorted(known)))
    return sorted(found, key=lambda c: (len(c), sorted(c))), hitting


def closure(names: Iterable[str], classes: Mapping[str, Plugin]) -> Names:
    """Return the canonical names of plugins and of everything they require, as far as known."""
    reached: dict[str, None] = {classes[name].manifest.name: None for name in names}
    for name in _growing(reached):
        reached.update(dict.fromkeys(_required(name, classes)))
    return frozenset(reached)


def _growing(items: dict[Any, None]) -> Iterator[Any]:
    """Yield each key, including keys added during iteration."""
    position = 0
    while position < len(items):
        yield from (batch := list(items)[position:])
        position += len(batch)


def _required(name: str, classes: Mapping[str, Plugin]) -> list[str]:
    wanted = (r for r in classes[name].manifest.requires if isinstance(r, str))
    return [classes[required].manifest.name for required in wanted if required in classes]


def _shrunk(names: Names, fails: Callable[[Names], bool]) -> Names:
    """Return a minimal subset that still fails."""
    for name in sorted(names):
        if fails(names - {name}):
            names = names - {name}
    return names


def _problems(names: Iterable[str], plugins: Mapping[str, Plugin]) -> tuple[str, ...]:
    """Return the messages of resolution for a set; empty if it can run."""
    try:
        resolve(sorted(names), plugins)
    except PluginResolutionError as error:
        return error.problems
    return ()


def _conflict(
    subset: Names, classes: Mapping[str, Plugin], plugins: Mapping[str, Plugin]
) -> Conflict:
    everything = closure(subset, classes)
    problems = _problems(everything, plugins)
    names = tuple(sorted(subset))
    brought = [
        f"'{name}' requires '{required}'"
        for name in sorted(everything)
        for required in sorted(_required(name, classes))
        if required not in subset
    ]
    if len(problems) == 1 and not brought:
        why, semicolon, way_out = problems[0].rpartition("; ")
        if semicolon:  # resolution's own fix is more specific
            return Conflict(plugins=names, why=why, way_out=way_out)
    reasons = ", and ".join(problem.rpartition("; ")[0] or problem for problem in problems)
    if brought:
        quoted = listed([f"'{name}'" for name in names], "and")
        together = "cannot run" if len(names) == 1 else "cannot run together"
        reasons = f"{quoted} {together}: {', '.join(brought)}, and {reasons}"
    return Conflict(plugins=names, why=reasons, way_out=_way_out(names, plugins))


def _way_out(names: Sequence[str], plugins: Mapping[str, Plugin]) -> str:
    features = [n for n in names if kind_of(plugins[n]) is Kind.FEATURE]
    ways = [f"leave out {listed(features, 'or')}"] if features else []
    for name in names:
        if (kind := kind_of(plugins[name])) is not Kind.FEATURE:
            ways.append(f"choose another {kind} than {name} ({CHOSEN_WITH[kind]})")
    return ", or ".join(ways)


def _features(
    names: Iterable[str], classes: Mapping[str, Plugin], plugins: Mapping[str, Plugin]
) -> tuple[str, ...]:
    everything = closure(names, classes)
    return tuple(sorted(n for n in everything if kind_of(plugins[n]) is Kind.FEATURE))


def _with_required(names: Iterable[str], catalogue: Catalogue) -> dict[str, Plugin]:
    """Load the classes of plugins and of the first-party plugins that they require.

    Third-party plugins that were not named are not imported.
    """
    classes: dict[str, Plugin] = {}
    wanted = [*names]
    while wanted:
        new = catalogue.load_each(wanted).classes
        classes.update(new)
        required = (r for p in new.values() for r in p.manifest.requires if isinstance(r, str))
        wanted = [
            r for r in required if r not in classes and r in catalogue and catalogue[r].first_party
        ]
    return classes


def _stubs(classes: Mapping[str, Plugin]) -> dict[str, Plugin]:
    """Return stubs that exclude nothing, for required plugins that are not loaded.

    A missing requirement is a problem of its own, not a conflict.
    """
    plugins = {p.manifest.name: p for p in classes.values()}
    platforms = (n for n, p in plugins.items() if kind_of(p) is Kind.PLATFORM)
    real = dict.fromkeys(platforms, Support.REAL)
    required = {r for p in plugins.values() for r in p.manifest.requires if isinstance(r, str)}
    return {
        name: type("StandIn", (), {"manifest": Manifest(name=name, summary="", platforms=real)})
        for name in sorted(required - {*classes})
    }


def _enable(names: Sequence[str]) -> str:
    return f"--enable {','.join(names)}" if names else "no feature"
