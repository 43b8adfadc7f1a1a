"""Build the plan of a run, without torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ascend_run.core.config.stages import stage_layers
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.implementations import claims_of, implementations
from ascend_run.prepare.config.loading import ResolvedConfig
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.kinds import Plugin, kind_of
from ascend_run.registry.resolution import Resolution
from ascend_run.types.layout import Layout, RankLists

from .explanation import (
    explain_forwards,
    explain_hooks,
    explain_plugin,
    idle,
)
from .records import Plan, PlannedLayout, PlannedPlugin, PlannedRank

if TYPE_CHECKING:
    from ascend_run.types.config import RunConfig

_AXES = ("tp", "cp", "dp", "pp", "ep")


def build_plan(
    resolution: Resolution,
    catalogue: Catalogue,
    resolved: ResolvedConfig,
    layout: Layout,
    hooks: Hooks,
) -> Plan:
    """Return the plan of a run, without costs, which the tool ``plan`` adds.

    Args:
        hooks: Hooks of the run's plugins; only torch-free hooks are called.

    Raises:
        HookError: Two plugins return the same key.
    """
    config = resolved.config
    own_groups = hooks.merge("ascend_process_groups", config=config, layout=layout)
    explained = explain_hooks(resolution)
    return Plan(
        versions=_versions(),
        device=config.platform,
        plugins=tuple(_plugin(plugin, resolution, catalogue) for plugin in resolution.order),
        hooks=explained,
        forwards=explain_forwards([plugin.manifest for plugin in hooks.plugins]),
        claims={str(claim): owner for claim, owner in resolution.owners.items()},
        idle=idle(resolution, config),
        layout=_layout(layout, config, own_groups),
        ranks=tuple(
            PlannedRank(rank=rank, **at) for rank, at in enumerate(layout.coordinates(*_AXES))
        ),
        process_groups=tuple(own_groups),
        environment=hooks.merge(
            "ascend_environment", config=config, local_world_size=config.run.nproc
        ),
        patching=tuple(n for o in explained if o.hook == "ascend_patches" for n in o.owners),
        panels=tuple(hooks.collect("ascend_report", lambda panel: panel.title)),
        origins=dict(resolved.origins),
    )


def _plugin(plugin: Plugin, resolution: Resolution, catalogue: Catalogue) -> PlannedPlugin:
    manifest = plugin.manifest
    candidate = catalogue[manifest.name]
    return PlannedPlugin(
        name=manifest.name,
        kind=str(kind_of(plugin)),
        version=candidate.version,
        distribution=candidate.distribution,
        summary=manifest.summary,
        numerics=str(manifest.numerics),
        maturity=str(manifest.maturity),
        platforms={name: str(how) for name, how in manifest.platforms.items()},
        claims=tuple(str(claim) for claim in claims_of(plugin)),
        hooks=tuple(implementations(plugin)),
        why=explain_plugin(plugin, resolution),
    )


def _layout(
    layout: Layout, config: RunConfig, own_groups: Mapping[str, Iterable[Iterable[int]]]
) -> PlannedLayout:
    groups: dict[str, RankLists] = {axis: layout.groups(axis) for axis in (*_AXES, "expt_dp")}
    own = {name: tuple(tuple(ranks) for ranks in lists) for name, lists in own_groups.items()}
    return PlannedLayout(
        world_size=layout.world_size,
        axes=layout.dense_axes,
        expert_axes=layout.expert_axes,
        groups=groups | own,
        stages=tuple(tuple(tuple(layers) for layers in chunks) for chunks in stage_layers(config)),
    )


def _versions() -> dict[str, str]:
    """Return the installed versions that a run uses."""
    distributions = ("ascend-run", "torch", "megatron-core")
    found = {"python": platform.python_version()}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
