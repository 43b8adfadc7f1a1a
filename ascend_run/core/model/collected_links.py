"""Collect what module wrappers return: apply replacements at once, install links at the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import attrs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.forward import ForwardLink, LinkPlace, NamedLink

from .forward_chain import in_order, install, wrap_forward

_PLATFORM: Final = "platform"
"""Name of the platform's links in chains; no plugin has it."""


class CollectedLinks:
    """Forward links of one model chunk, installed once all are collected.

    Args:
        hooks: Their plugins are in resolved order, which is the order of the links, whichever hook
            returned them.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._manifests = {plugin.manifest.name: plugin.manifest for plugin in hooks.plugins}
        self._links: dict[nn.Module, list[NamedLink]] = {}

    def take(self, hook: str, plugin: str, inner: object, result: object) -> Any:
        """Return the replacement of ``inner``; it is ``inner`` itself if the hook returned links.

        Raises:
            HookError: The hook links a module that the plugin's manifest does not declare.
        """
        links = {"": result} if isinstance(result, ForwardLink) else result
        if not isinstance(links, Mapping):
            return result
        for name, link in links.items():
            self._add(hook, plugin, inner, name, link)
        return inner

    def add_platform(self, module: nn.Module, link: ForwardLink) -> None:
        """Add the platform's replacement of a module's own forward, inside all plugins' links."""
        named = NamedLink(name=_PLATFORM, place=LinkPlace.OWN, link=link)
        self._links.setdefault(module, []).append(named)

    def install(self, model: nn.Module) -> None:
        """Compose and install all chains.

        Raises:
            HookError: See ``forward_chain.install``.
        """
        order = [_PLATFORM, *self._manifests]
        install(model, {module: in_order(links, order) for module, links in self._links.items()})

    def _add(self, hook: str, plugin: str, inner: object, name: str, link: ForwardLink) -> None:
        held = dict(inner.named_modules()) if isinstance(inner, nn.Module) else {}
        if name not in held:
            raise HookError(
                f"{hook}: '{plugin}' links the forward of {name or 'what it wraps'!r}, which is "
                f"not a module there; expected one of: {', '.join(map(repr, held)) or 'none'}"
            )
        kind = module_kind(name, held[name]) if name else hook.removeprefix("ascend_")
        place = self._manifests[plugin].forward_links.get(kind)
        if place is None:
            raise HookError(
                f"{hook}: '{plugin}' links the forward of a {kind}, which its manifest does not "
                f'declare; add forward_links={{"{kind}": LinkPlace.AROUND}} to it'
            )
        named = NamedLink(name=plugin, place=place, link=link)
        wrap = self._hooks.naming(hook, plugin).around(partial(wrap_forward, named))
        named = attrs.evolve(named, link=attrs.evolve(link, wrap=wrap))
        self._links.setdefault(held[name], []).append(named)


def module_kind(name: str, module: nn.Module) -> str:
    """Return a module's kind in manifests and ``plan``.

    One of ``layer``, ``linear`` (of a layer), ``moe_layer``, or its attribute name in its parent.
    """
    last = name.rpartition(".")[2]
    if isinstance(module, TransformerLayer):
        return "layer"
    if hasattr(module, "router"):
        return "moe_layer"
    is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
    return "linear" if is_linear and last != "output_layer" else last
