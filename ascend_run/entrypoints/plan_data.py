"""What ``plan.json`` holds: a run as plain values, assembled without torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_run.core.config.loading import ResolvedConfig
from ascend_run.core.config.stages import stage_layers
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import ReportPanel
from ascend_run.plugin_api.layout import Layout
from ascend_run.registry.discovery import Catalogue
from ascend_run.registry.explanation import explain_hooks, explain_plugin, idle
from ascend_run.registry.hooks import implementations
from ascend_run.registry.kinds import Plugin, kind_of
from ascend_run.registry.resolution import Resolution

from .plan_costs import cost_data

_AXES = ("tp", "cp", "dp", "pp", "ep")
_DEFAULTS = ("default", "plugin default", "Megatron's default")


def plan_data(
    resolution: Resolution,
    catalogue: Catalogue,
    resolved: ResolvedConfig,
    layout: Layout,
    hooks: Hooks,
) -> dict[str, Any]:
    """The plan of a run as JSON values.

    Args:
        hooks: Of the run's plugins; only torch-free ones are asked.

    Raises:
        HookError: Two plugins contribute one key.
    """
    config = resolved.config
    own_groups = {
        name: [[*ranks] for ranks in lists]
        for name, lists in hooks.merge(
            "ascend_process_groups", config=config, layout=layout
        ).items()
    }
    explained = explain_hooks(resolution)
    patching = [owners for owners in explained if owners.hook == "ascend_patches"]
    return {
        "versions": _versions(),
        "device": config.platform,
        "plugins": [_plugin(plugin, resolution, catalogue) for plugin in resolution.order],
        "hooks": [
            {
                "hook": o.hook,
                "kind": str(o.kind),
                "point": str(o.point),
                "owners": [*o.owners],
                "why": o.why,
            }
            for o in explained
        ],
        "claims": {str(claim): owner for claim, owner in resolution.owners.items()},
        "idle": idle(resolution, config),
        "layout": {
            "world_size": layout.world_size,
            "axes": layout.dense_axes,
            "expert_axes": layout.expert_axes,
            "groups": _axis_groups(layout) | own_groups,
            "stages": [[[*layers] for layers in chunks] for chunks in stage_layers(config)],
        },
        "ranks": _ranks(layout),
        "cost": cost_data(config, layout, hooks),
        "process_groups": [*own_groups],
        "environment": hooks.merge(
            "ascend_environment", config=config, local_world_size=config.run.nproc
        ),
        "patching": [name for owners in patching for name in owners.owners],
        "panels": [_panel(p) for p in hooks.collect("ascend_report", lambda panel: panel.title)],
        "origins": dict(resolved.origins),
    }


def chosen_values(
    resolved: ResolvedConfig, *, everything: bool = False
) -> Iterator[tuple[str, Any, str]]:
    """(key, value, origin) of every value that was set, or of all.

    Fields of Megatron that cannot be chosen have a default and no value.
    """
    for key, origin in resolved.origins.items():
        if everything or origin not in _DEFAULTS:
            value = _value(resolved.config, key)
            if value is not attrs.NOTHING:
                yield key, value, origin


def _value(config: Any, key: str) -> Any:
    found = config
    for part in key.split(".", 2):  # plugins.swap-attention.min_bytes
        if isinstance(found, Mapping):
            found = found.get(part, attrs.NOTHING)
        else:
            found = getattr(found, part)
    return found


def _plugin(plugin: Plugin, resolution: Resolution, catalogue: Catalogue) -> dict[str, Any]:
    manifest = plugin.manifest
    candidate = catalogue[manifest.name]
    return {
        "name": manifest.name,
        "kind": str(kind_of(manifest)),
        "version": candidate.version,
        "distribution": candidate.distribution,
        "summary": manifest.summary,
        "numerics": str(manifest.numerics),
        "maturity": str(manifest.maturity),
        "platforms": {name: str(how) for name, how in manifest.platforms.items()},
        "claims": [str(claim) for claim in manifest.claims],
        "hooks": [*implementations(plugin)],
        "why": explain_plugin(plugin, resolution),
    }


def _panel(panel: ReportPanel) -> dict[str, Any]:
    return {"title": panel.title, "metrics": [*panel.metrics], "unit": panel.unit}


def _axis_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Axis -> the groups of ranks along it."""
    return {axis: [[*ranks] for ranks in layout.groups(axis)] for axis in (*_AXES, "expt_dp")}


def _ranks(layout: Layout) -> list[dict[str, int]]:
    """Every rank's place along every axis."""
    return [{"rank": rank, **place} for rank, place in enumerate(layout.places(*_AXES))]


def _versions() -> dict[str, str]:
    """The versions that a run uses, from the metadata of what is installed."""
    distributions = ("ascend-run", "torch", "megatron-core")
    found = {"python": platform.python_version()}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
