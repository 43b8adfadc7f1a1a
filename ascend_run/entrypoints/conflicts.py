"""Why a set of plugins cannot run, as minimal sets, and what of it can. No torch.

A set is a conflict when nothing that could be added makes it run: what its members require counts
as there. It is minimal when each smaller part of it can run. Whether a set can run is asked of
resolution itself, which alone knows the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError, PluginResolutionError
from ascend_run.plugin_api.manifest import Manifest, Support
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.kinds import CHOSEN_WITH, Kind, Plugin, kind_of
from ascend_run.registry.resolution import resolve

_MOST_NODES: Final = 4096
"""Of the search for what to leave out; more only where dozens of plugins exclude one another."""
_MOST_OFFERED: Final = 3

Names = frozenset[str]


@attrs.frozen(kw_only=True)
class Conflict:
    """Plugins that cannot run together, though any part of them can."""

    plugins: tuple[str, ...]
    why: str
    way_out: str

    @property
    def sentence(self) -> str:
        """Why and way out as one line of a refusal."""
        return f"{self.why}; {self.way_out}"


@attrs.frozen(kw_only=True)
class Conflicts:
    """Everything that excludes something in what was asked for."""

    found: tuple[Conflict, ...]
    can_run: tuple[tuple[str, ...], ...]
    """The largest sets of features that can run, with what they require; empty where leaving out
    features is not enough."""

    explains: tuple[str, ...]
    """Sentences of resolution that the conflicts stand for."""

    def told(self, error: AscendRunError) -> PluginResolutionError:
        """A refusal with the conflicts in place of the sentences that resolution has for them."""
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
    """A refusal of these plugins with their conflicts; the same where there are none."""
    classes = _with_required(names, catalogue)
    found = find_conflicts(names, classes)
    return found.told(error) if found.found else error


def find_conflicts(names: Iterable[str], classes: Mapping[str, Plugin]) -> Conflicts:
    """Every minimal conflict among the plugins that were asked for.

    Args:
        names: Features, platform, task and family; those without a class are left out.
        classes: Each of them by its name, and what they require, as far as it can be had.
    """
    classes = {**_stand_ins(classes), **classes}
    plugins = {p.manifest.name: p for p in classes.values()}
    classes = {**plugins, **classes}  # who was asked for by an alias is there by its name too
    asked = frozenset(classes[name].manifest.name for name in names if name in classes)

    def fails(subset: Names) -> bool:
        return bool(_problems(closure(subset, classes), plugins))

    if not fails(asked):
        return Conflicts(found=(), can_run=(), explains=())
    sets, hitting = minimal_failing_sets(asked, fails)
    features = {n for n in asked if kind_of(plugins[n].manifest) is Kind.FEATURE}
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
    """Every minimal set that fails, and sets to leave out so that the rest does not.

    The second are, for each way to hit every one of the first, its members: the smallest are
    among them. Source of the search: Reiter 1987, A theory of diagnosis from first principles.

    Args:
        fails: Of a set; every superset of one that fails must fail too.
    """
    found: list[Names] = []
    for size in (1, 2):  # almost all there is, without a search
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
    """Plugins and all that they require, as far as it is among the classes; canonical names."""
    reached: dict[str, None] = {classes[name].manifest.name: None for name in names}
    for name in _growing(reached):
        reached.update(dict.fromkeys(_required(name, classes)))
    return frozenset(reached)


def _growing(items: dict[Any, None]) -> Iterator[Any]:
    """Each key, those too that are added while this goes on."""
    place = 0
    while place < len(items):
        yield from (batch := list(items)[place:])
        place += len(batch)


def _required(name: str, classes: Mapping[str, Plugin]) -> list[str]:
    wanted = (r for r in classes[name].manifest.requires if isinstance(r, str))
    return [classes[required].manifest.name for required in wanted if required in classes]


def _shrunk(names: Names, fails: Callable[[Names], bool]) -> Names:
    """A minimal part that still fails."""
    for name in sorted(names):
        if fails(names - {name}):
            names = names - {name}
    return names


def _problems(names: Iterable[str], plugins: Mapping[str, Plugin]) -> tuple[str, ...]:
    """What resolution has against a set; nothing where it can run."""
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
        if semicolon:  # its own way out, which knows more
            return Conflict(plugins=names, why=why, way_out=way_out)
    reasons = ", and ".join(problem.rpartition("; ")[0] or problem for problem in problems)
    if brought:
        quoted = listed([f"'{name}'" for name in names], "and")
        together = "cannot run" if len(names) == 1 else "cannot run together"
        reasons = f"{quoted} {together}: {', '.join(brought)}, and {reasons}"
    return Conflict(plugins=names, why=reasons, way_out=_way_out(names, plugins))


def _way_out(names: Sequence[str], plugins: Mapping[str, Plugin]) -> str:
    features = [n for n in names if kind_of(plugins[n].manifest) is Kind.FEATURE]
    ways = [f"leave out {listed(features, 'or')}"] if features else []
    for name in names:
        if (kind := kind_of(plugins[name].manifest)) is not Kind.FEATURE:
            ways.append(f"choose another {kind} than {name} ({CHOSEN_WITH[kind]})")
    return ", or ".join(ways)


def _features(
    names: Iterable[str], classes: Mapping[str, Plugin], plugins: Mapping[str, Plugin]
) -> tuple[str, ...]:
    everything = closure(names, classes)
    return tuple(sorted(n for n in everything if kind_of(plugins[n].manifest) is Kind.FEATURE))


def _with_required(names: Iterable[str], catalogue: Catalogue) -> dict[str, Plugin]:
    """The classes of plugins, and of ours that they require: a third party's that nobody named is
    not imported."""
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


def _stand_ins(classes: Mapping[str, Plugin]) -> dict[str, Plugin]:
    """For what is required and cannot be looked at here: a plugin that excludes nothing. That it
    is missing is a problem of its own, and no conflict."""
    plugins = {p.manifest.name: p for p in classes.values()}
    platforms = dict.fromkeys(
        (n for n, p in plugins.items() if kind_of(p.manifest) is Kind.PLATFORM), Support.REAL
    )
    required = {r for p in plugins.values() for r in p.manifest.requires if isinstance(r, str)}
    return {
        name: type(
            "StandIn", (), {"manifest": Manifest(name=name, summary="", platforms=platforms)}
        )
        for name in sorted(required - {*classes})
    }


def _enable(names: Sequence[str]) -> str:
    return f"--enable {','.join(names)}" if names else "no feature"


def listed(words: Sequence[str], last: str) -> str:
    """``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
