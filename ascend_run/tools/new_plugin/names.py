"""Names of a new plugin's parts, and checks that they are available."""

from __future__ import annotations

import builtins
import keyword
import re
from importlib.util import find_spec
from typing import Final

import attrs

from ascend_run import plugin_api
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import CHOSEN_WITH, GROUPS, Kind
from ascend_run.registry.offers import normalised

from .public_names import public_names
from .seams import template_of

PREFIX: Final = "ascend-run-"
LONGEST: Final = 40
"""Longer names would exceed the line length in the templates."""
KIND_OF: Final = {
    "feature": Kind.FEATURE,
    "platform": Kind.PLATFORM,
    "task": Kind.TASK,
    "family": Kind.MODEL,
}
_PARTS: Final = ("", "Config", "Task", "Device")
"""Endings of the classes that the templates define."""
_IN_USE: Final = frozenset(
    {*public_names(plugin_api), *dir(builtins), *keyword.kwlist}
    | {"Any", "Final", "Iterator", "LayerSizes", "LossHistory", "Mapping", "MappingProxyType"}
    | {"Nesterov", "Optimizer", "Sequence", "TemperedKernel", "Tensor", "TypeVar"}
)


@attrs.frozen(kw_only=True)
class Names:
    """Every spelling of one plugin's name."""

    name: str
    kind: str
    template: str
    """Folder of the templates: a seam, or the kind."""
    distribution: str
    """``ascend-run-my-feature``."""
    module: str
    """``ascend_run_my_feature``."""
    snake: str
    """``my_feature``."""
    class_name: str
    """``MyFeature``; with the suffix ``Plugin`` if that name is already used."""
    title: str
    """``My feature``."""
    group: str
    """Entry-point group."""
    chosen: str
    """Command-line arguments that select it."""

    @classmethod
    def of(cls, name: str, kind: str, seam: str | None = None) -> Names:
        """Build all spellings of a name, without checking that it is available.

        Args:
            seam: One of ``SEAMS`` of this kind; None: the default one.
        """
        snake = re.sub(r"\W+", "_", name).strip("_").lower()
        class_name = "".join(part.capitalize() for part in snake.split("_"))
        if any(f"{class_name}{ending}" in _IN_USE for ending in _PARTS):
            class_name += "Plugin"
        chosen_with = CHOSEN_WITH[KIND_OF[kind]]
        return cls(
            name=name,
            kind=kind,
            template=template_of(kind, seam),
            distribution=PREFIX + snake.replace("_", "-"),
            module=f"{PREFIX.replace('-', '_')}{snake}",
            snake=snake,
            class_name=class_name,
            title=snake.replace("_", " ").capitalize(),
            group=next(group for group, its in GROUPS.items() if its is KIND_OF[kind]),
            chosen=chosen_with + ("" if chosen_with.endswith("=") else " ") + name,
        )


def name_problems(name: str, kind: str) -> list[str]:
    """Return messages why a plugin cannot have this name."""
    pattern = rf"[a-z][a-z0-9]*({'[-_]' if kind == 'family' else '-'}[a-z0-9]+)*"
    if not re.fullmatch(pattern, name):
        near = Names.of(name, kind).snake.replace("_", "-")
        fix = near if re.fullmatch(pattern, near) else "my-feature"
        also = "; a family may have Hugging Face's underscores" if kind == "family" else ""
        return [f"the name '{name}' is not kebab-case, such as '{fix}'{also}"]
    problems = []
    if name.startswith(PREFIX):
        rest = name.removeprefix(PREFIX)
        problems.append(
            f"the name '{name}' starts with '{PREFIX}', which the distribution's name adds; "
            f"use {rest}"
        )
    if len(name) > LONGEST:
        problems.append(f"the name '{name}' has {len(name)} characters; use at most {LONGEST}")
    return problems or _taken(Names.of(name, kind))


def _taken(names: Names) -> list[str]:
    """Messages if a plugin, distribution or module of that name exists; imports nothing."""
    catalogue = discover()
    offered = {other: found.offered_by for other, found in catalogue.items()}
    offered |= {
        other: " and ".join(candidate.offered_by for candidate in found)
        for other, found in catalogue.duplicates.items()
    }
    for other, owner in sorted(offered.items()):
        if normalised(other) == normalised(names.name):
            return [f"the name '{names.name}' is taken: {owner} has the plugin '{other}'; {_WAY}"]
    found = find_spec(names.module)
    if found is not None:
        return [f"the module {names.module} is installed already, in {found.origin}; {_WAY}"]
    return []


_WAY: Final = "choose another, or uninstall that one"
