"""Whether the parts of a run fit together, once each of them is known to be sound. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_run.core.config.attention_needs import AttentionPart, attention_problems
from ascend_run.core.config.layout import run_problems
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.layout import Layout
from ascend_run.registry.explanation import idle
from ascend_run.registry.hooks import implementations
from ascend_run.registry.kinds import Kind, kind_of
from ascend_run.registry.resolution import Resolution, check_conditions


def fit_problems(
    config: RunConfig, layout: Layout, resolution: Resolution, hooks: Hooks
) -> list[str]:
    """Everything in a run that does not fit together: conditions, layout, plugins' own checks."""
    partition = hooks.provide("ascend_sequence_partition", config=config)
    multiple = None if partition is None else partition.multiple
    problems = check_conditions(resolution, config)
    problems += run_problems(
        config, layout, claimed=[*resolution.owners], sequence_multiple=multiple
    )
    problems += attention_problems(config, _attention_parts(config, resolution, hooks.plugins))
    for name, answer in hooks.contributions("ascend_check", config=config, layout=layout):
        if isinstance(answer, str):
            raise HookError(f"'{name}' returns a text from ascend_check; expected a list of texts")
        problems += answer
    return list(dict.fromkeys(problems))


def _attention_parts(
    config: RunConfig, resolution: Resolution, plugins: Sequence[Any]
) -> list[AttentionPart]:
    """The plugins around one another in the attention, as their manifests declare them, and
    outermost those that only ask something of it.

    Args:
        plugins: Instances, whose manifest may ask more than the class's where an option does.
    """
    unused = idle(resolution, config)
    active = [plugin for plugin in plugins if plugin.manifest.name not in unused]
    kernels = [p for p in active if "ascend_attention_kernel" in implementations(p)]
    # The platform is asked last, as the default.
    kernels.sort(key=lambda plugin: kind_of(plugin.manifest) is Kind.PLATFORM)
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
