"""Check that valid parts of a run are compatible. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ascend_run.core.config.attention_needs import AttentionPart, attention_problems
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.plan.explanation import idle
from ascend_run.registry.kinds import Kind, kind_of
from ascend_run.registry.resolution import Resolution, check_conditions
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .activation_policy import policy_problems
from .layout import run_problems
from .optimizer import optimizer_problems
from .stages import stage_problems

if TYPE_CHECKING:
    from ascend_run.plugin_api.manifest import EnabledPlugin


def compatibility_problems(
    config: RunConfig,
    layout: Layout,
    resolution: Resolution,
    hooks: Hooks,
    model_differences: Callable[[str], Sequence[str]],
) -> list[str]:
    """Return all incompatibilities of a run: conditions, layout, plugins' own checks."""
    partition = hooks.provide("ascend_sequence_partition", config=config)
    multiple = None if partition is None else partition.multiple
    problems = check_conditions(resolution, config)
    problems += run_problems(
        config, layout, claimed=[*resolution.owners], sequence_multiple=multiple
    )
    problems += attention_problems(config, _attention_parts(config, resolution, hooks.plugins))
    problems += optimizer_problems(config, layout, hooks)
    if not stage_problems(config):
        problems += policy_problems(config, hooks)
    given = {
        "layout": layout,
        "manifests": [plugin.manifest for plugin in hooks.plugins],
        "model_differences": model_differences,
    }
    for _, result in hooks.sequences("ascend_check", config=config, **given):
        problems += result
    return list(dict.fromkeys(problems))


def _attention_parts(
    config: RunConfig, resolution: Resolution, plugins: Sequence[EnabledPlugin]
) -> list[AttentionPart]:
    """Return the attention kernel, its wrappers, then plugins that only need features of it.

    Features are those of the instances' manifests, which may need more than the classes'.
    """
    unused = idle(resolution, config)
    active = [plugin for plugin in plugins if plugin.manifest.name not in unused]
    kernels = [p for p in active if "ascend_attention_kernel" in implementations(p)]
    # Providers call the platform last, as the default.
    kernels.sort(key=lambda plugin: kind_of(plugin) is Kind.PLATFORM)
    wrappers = [plugin for plugin in active if "ascend_attention" in implementations(plugin)]
    asking = [
        p for p in active if p not in (*kernels, *wrappers) and p.manifest.attention_needs.names()
    ]
    return [
        AttentionPart(
            plugin=plugin.manifest.name,
            can=plugin.manifest.attention,
            needs=plugin.manifest.attention_needs,
        )
        for plugin in (*kernels[:1], *wrappers, *asking)
    ]
