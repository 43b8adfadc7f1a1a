"""The plugins of a run with their options, and the config that holds these. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ascend_run.core.hooks import Hooks
from ascend_run.registry.kinds import Kind, Plugin, kind_of
from ascend_run.registry.resolution import Resolution
from ascend_run.types.config import RunConfig

from .config.loading import ResolvedConfig, build_config
from .config.raw import RawConfig


def instances(order: Iterable[Plugin], config: RunConfig) -> list[Any]:
    """Create a new instance of every plugin with its options, in the same order."""
    return [
        plugin(config.plugins[plugin.manifest.name]) if options_of(plugin) else plugin()
        for plugin in order
    ]


def options_of(plugin: Plugin) -> type | None:
    """Return the plugin's options class, or None."""
    options: type | None = getattr(plugin, "config_class", None)
    return options


def config_of(raw: RawConfig, resolution: Resolution) -> tuple[ResolvedConfig, Hooks]:
    """Read the config of a run with these plugins, and create them with it.

    Raises:
        ConfigError: Values are invalid, or ``model.hf_path`` has no model of the family.
    """
    family = family_of(resolution)
    hf_values: Mapping[str, object] = {}
    if raw.hf_path is not None:  # imported only by runs that start from a Hugging Face folder
        from ascend_run.core.hugging_face.json_files import read_hf_config

        from .hugging_face.config_keys import config_from_hf

        hf_values = config_from_hf(family, read_hf_config(raw.hf_path))
    build = partial(
        build_config,
        raw,
        {plugin.manifest.name: options_of(plugin) for plugin in resolution.order},
        family.defaults,
        resolution.of_kind(Kind.FEATURE),
        hf_values=hf_values,
    )
    resolved = build()
    hooks = Hooks(instances(resolution.order, resolved.config))
    manifests = [plugin.manifest for plugin in hooks.plugins]
    given = {"config": resolved.config, "manifests": manifests}
    if defaults := hooks.merge_named("ascend_defaults", **given):
        resolved = build(plugin_defaults=defaults)
        hooks = Hooks(instances(resolution.order, resolved.config))
    return resolved, hooks


def family_of(resolution: Resolution) -> Any:
    """Return the data of the model family, which the config needs before any option is known."""
    (plugin,) = (p for p in resolution.order if kind_of(p) is Kind.MODEL)
    options = options_of(plugin)
    family = plugin(options()) if options else plugin()
    return Hooks([family]).require("ascend_model_family")
