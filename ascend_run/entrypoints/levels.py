"""``--level N``: the features of our own up to a level that can run as this run is. No torch.

A level chooses nothing that the user would have to decide: a plugin that changes the result of the
model, one that changes nothing in this run, and each of two that exclude one another are left out,
with the reason. What the user enables by name stands whatever the level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import attrs

from ascend_run.core.config.raw import COMMAND_LINE, RawConfig
from ascend_run.plugin_api.errors import PluginResolutionError
from ascend_run.plugin_api.manifest import Numerics
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.explanation import BY_NAME
from ascend_run.registry.kinds import Kind, Plugin
from ascend_run.registry.pairs import exclusion


@attrs.frozen(kw_only=True)
class Trial:
    """What comes of a run with some features."""

    problems: frozenset[str]
    """Why it cannot start; none where it can."""
    idle: Mapping[str, str] = attrs.field(factory=dict)
    """Features that change nothing in it -> why; empty where that cannot be told."""


Try: TypeAlias = Callable[[Sequence[str]], Trial]
"""From the features of a run to what comes of it; the rest of the run is as the user wants it."""


@attrs.frozen(kw_only=True)
class Bundle:
    """What a level comes to in one run."""

    level: int
    members: tuple[str, ...] = ()
    """Features that it enables, beside those that are enabled by name."""
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    """Features of the level and below that it does not enable -> why."""

    def told_in(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of a run, which says what the level came to and why each member is there."""
        why = f"a member of --level {self.level}"
        plugins = [
            {**p, "why": p["why"].replace(BY_NAME, why)} if p["name"] in self.members else p
            for p in plan["plugins"]
        ]
        bundle = {
            "level": self.level,
            "members": [*self.members],
            "left_out": dict(self.left_out),
        }
        return {**plan, "plugins": plugins, "level": bundle}


def choose_members(
    level: int, enabled: Sequence[str], disabled: Iterable[str], catalogue: Catalogue, attempt: Try
) -> Bundle:
    """The members of a level for one run; blind to the order of naming.

    Args:
        enabled: Features that the user named, canonical or not.
        disabled: Features that the user wants left out.
    """
    classes, left_out = _ours(catalogue)
    named = {plugin.manifest.name for plugin in catalogue.load_each(enabled).classes.values()}
    disabled_names = {
        plugin.manifest.name for plugin in catalogue.load_each(disabled).classes.values()
    }
    wanted = sorted(
        name for name, p in classes.items() if p.manifest.level <= level and name not in named
    )
    left_out |= {name: "disabled by name" for name in wanted if name in disabled_names}
    for name in wanted:
        if name not in left_out and classes[name].manifest.numerics is Numerics.MODEL:
            left_out[name] = "it changes the model's result; name it with --enable if you want that"
    candidates = [name for name in wanted if name not in left_out]
    accepted, reasons = _accepted(candidates, enabled, attempt)
    exclusive = _exclusive(accepted, classes)
    accepted = [name for name in accepted if name not in exclusive]
    # What needs another member can be tried once that one is there.
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
    """Our own features by canonical name, and those that cannot be had. A third party's is not
    imported: a level is no word for it."""
    loaded = catalogue.load_each(
        name for name, c in catalogue.items() if c.first_party and c.kind is Kind.FEATURE
    )
    classes = {plugin.manifest.name: plugin for plugin in loaded.classes.values()}
    return classes, {name: str(error) for name, error in loaded.failures.items()}


def _accepted(
    candidates: Sequence[str], beside: Sequence[str], attempt: Try
) -> tuple[list[str], dict[str, str]]:
    """Candidates that add no problem to the run when they come alone, and why the others do not
    come."""
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
    """Members that cannot come together: none of them comes."""
    reasons: dict[str, list[str]] = {}
    for first, second in combinations(names, 2):
        if why := exclusion(classes[first], classes[second]):
            reasons.setdefault(first, []).append(why)
            reasons.setdefault(second, []).append(why)
    return {
        name: f"{'; '.join(why)}; name the one that you want with --enable"
        for name, why in reasons.items()
    }


def without_disabled(raw: RawConfig, catalogue: Catalogue) -> list[str]:
    """The features that are enabled by name and not disabled, which counts over the file.

    Raises:
        PluginResolutionError: Nobody offers a disabled one, or the command line enables it too.
    """
    loaded = catalogue.load_each(raw.disable)
    problems = [str(error) for error in loaded.failures.values()]
    disabled = {plugin.manifest.name for plugin in loaded.classes.values()}
    enabled = catalogue.load_each(raw.enable).classes
    kept = [n for n in raw.enable if n not in enabled or enabled[n].manifest.name not in disabled]
    given = raw.values.get("enable")
    if given is not None and given.origin == COMMAND_LINE:
        problems += [
            f"'{name}' is both enabled and disabled on the command line; leave out one of the two"
            for name in raw.enable
            if name not in kept
        ]
    if problems:
        raise PluginResolutionError("cannot enable this set", problems)
    return kept
