"""The records of a plan, with the keys of ``plan.json``. No torch.

A field that is None is left out of ``plan.json``. A field with a default is optional where the plan
of another version is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ascend_run.types.run import ReportPanel

from .explanation import ForwardLinks, HookOwners


@attrs.frozen(kw_only=True)
class PlannedPlugin:
    """An enabled plugin."""

    name: str
    kind: str = "feature"
    """A ``registry.kinds.Kind``."""
    version: str
    distribution: str
    summary: str
    numerics: str
    maturity: str
    platforms: Mapping[str, str]
    """Platform -> how well the plugin is tested on it."""
    claims: tuple[str, ...]
    hooks: tuple[str, ...]
    """Hooks that it implements."""
    why: str
    """Why it is enabled, and its position in the order."""


@attrs.frozen(kw_only=True)
class PlannedLayout:
    """Sizes and groups of the parallel axes."""

    world_size: int | None = None
    axes: Mapping[str, int]
    """Axes of the dense parameters' grid, innermost first."""
    expert_axes: Mapping[str, int]
    """Axes of the experts' grid, innermost first."""
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    """Axis, or name of a plugin's process groups -> ranks of each group."""
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    """Pipeline rank -> chunk -> global indices of its layers."""


@attrs.frozen(kw_only=True)
class PlannedRank:
    """A rank and its coordinates."""

    rank: int
    tp: int | None = None
    cp: int | None = None
    dp: int | None = None
    pp: int | None = None
    ep: int | None = None

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis -> coordinate, where it is known."""
        axes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
        return {axis: at for axis, at in axes.items() if at is not None}


@attrs.frozen(kw_only=True)
class Bundle:
    """The features that a level selects in one run."""

    level: int
    members: tuple[str, ...] = ()
    """Features that it enables, besides those enabled by name."""
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    """Maps features up to the level that it does not enable to the reason."""


@attrs.frozen(kw_only=True)
class Plan:
    """What a run will do."""

    versions: Mapping[str, str]
    """Distribution, or ``python`` -> installed version."""
    device: str
    """The platform."""
    plugins: tuple[PlannedPlugin, ...]
    """Innermost first."""
    hooks: tuple[HookOwners, ...]
    """Implemented hooks, in the order in which a run reaches them."""
    forwards: tuple[ForwardLinks, ...]
    claims: Mapping[str, str]
    """Claim -> its plugin."""
    idle: Mapping[str, str]
    """Plugins that have no effect in this run -> the condition that disables them."""
    layout: PlannedLayout
    ranks: tuple[PlannedRank, ...]
    process_groups: tuple[str, ...]
    """Names of the groups that plugins add."""
    environment: Mapping[str, str]
    """Environment variables that plugins set."""
    patching: tuple[str, ...]
    """Plugins that patch functions of other packages."""
    panels: tuple[ReportPanel, ...]
    """Charts that plugins add to the report."""
    origins: Mapping[str, str]
    """Config key -> where its value comes from."""
    level: Bundle | None = None
    """The result of ``--level``; None without it."""
