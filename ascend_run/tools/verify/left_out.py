"""Choose the run without one plugin, for each plugin under test. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.plugin_api import AscendRunError, Condition, Manifest
from ascend_run.types.layout import AXIS_KEYS

from .questions import Side
from .stand_in import needs_stand_in

MakeSide = Callable[[str, tuple[str, ...]], Side]
"""(name of the run, features) -> the run in the candidate's layout."""
_AXES: Final = {key: axis for axis, key in AXIS_KEYS.items()}


@attrs.frozen(kw_only=True)
class LeftOut:
    """One plugin under test, and the runs that show whether it acts."""

    plugin: str
    idle: Condition | None = None
    """The condition that makes it idle in the run; nothing is run then."""
    with_it: Side
    """The candidate; without the plugins that require this one, if there are any."""
    without: Side | None = None
    """The same run without it; None if it cannot run."""
    fix: str = ""
    """What would exercise it, if it did nothing."""


def left_out(
    names: Sequence[str],
    plugins: Mapping[str, Any],
    idle: Mapping[str, object],
    candidate: Side,
    make: MakeSide,
    known: Sequence[Side],
    not_set: Mapping[str, Sequence[str]],
) -> Iterator[LeftOut]:
    """Yield every plugin under test.

    Args:
        names: Features under test, as they were named.
        plugins: Name -> class of every enabled feature.
        idle: Plugins that declare to be idle in the candidate.
        known: Runs that are compared anyway; one that is the same run is used again.
        not_set: Plugin -> its ``small_model_settings`` that the user has set otherwise.
    """
    manifests = {name: plugin.manifest for name, plugin in plugins.items()}
    for name in names:
        manifest = manifests[name]
        found = LeftOut(plugin=name, with_it=candidate, fix=_fix(manifest, not_set.get(name, ())))
        if manifest.name in idle:
            assert manifest.idle is not None
            yield attrs.evolve(found, idle=manifest.idle, fix=_fix_of_idle(manifest.idle))
            continue
        dependents = _dependents(name, manifests)
        rest = tuple(other for other in candidate.enable if other not in dependents)
        if dependents:
            found = attrs.evolve(found, with_it=_steps(make(f"{', '.join(rest)} alone", rest)))
        remaining = tuple(other for other in rest if other != name)
        without = make(f"the same run without {name}", remaining)
        without = attrs.evolve(without, with_stand_in=needs_stand_in(plugins[name]))
        try:
            without.prepare()
        except AscendRunError:
            yield found
            continue
        same = [side for side in known if is_same_run(side, without)]
        yield attrs.evolve(found, without=same[0] if same else _steps(without))


def is_same_run(one: Side, other: Side) -> bool:
    """Return whether two sides only differ in their names and in what is recorded of them."""

    def trained(side: Side) -> Side:
        return attrs.evolve(side, name="", by_differences=False, keeps_samples=False)

    return trained(one) == trained(other)


def _steps(side: Side) -> Side:
    return attrs.evolve(side, only_steps=True, by_differences=False, keeps_samples=False)


def _dependents(name: str, manifests: Mapping[str, Manifest]) -> set[str]:
    """Enabled plugins that require a plugin, also through others."""
    found: set[str] = set()
    wanted = {name, manifests[name].name}
    while True:
        more = {
            other
            for other, manifest in manifests.items()
            if wanted & {need for need in manifest.requires if isinstance(need, str)}
        }
        if more <= found:
            return found
        found |= more
        wanted |= more | {manifests[other].name for other in more}


def _fix_of_idle(condition: Condition) -> str:
    if condition.field in _AXES:
        return f"verify it in a layout with {_AXES[condition.field]}=2"
    return condition.fix


def _fix(manifest: Manifest, not_set: Sequence[str]) -> str:
    if not_set:
        return f"set {' '.join(not_set)}"
    return manifest.exercised_by or (
        "verify it in a run in which it acts: its options, the model (--model moe) or the layout"
    )
