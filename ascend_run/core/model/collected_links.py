"""Collect what module wrappers return: apply replacements at once, install links at the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import attrs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ascend_run.core.config.activation_policy import HOOK, LayerPolicy
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import Device, Keeping
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
        self._outermost: dict[nn.Module, list[NamedLink]] = {}

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

    def keep(self, layer: nn.Module, policy: LayerPolicy, device: Device) -> None:
        """Add the links by which a layer's activations are kept, around all others of a module:
        what discards a module's input is outermost, since everything else may read it."""
        parts: dict[tuple[str, Any, bool], list[str]] = {}
        for part, (owner, treatment) in policy.treated.items():
            if treatment.links is not None:
                discards = treatment.keeping is Keeping.DISCARD
                parts.setdefault((owner, treatment.links, discards), []).append(part)
        for (owner, links, _), names in sorted(parts.items(), key=lambda found: found[0][2]):
            with self._hooks.naming(HOOK, owner):
                made = {layer.get_submodule(n): x for n, x in links(layer, names, device).items()}
            for module, link in made.items():
                named = self._named(HOOK, NamedLink(name=owner, place=LinkPlace.AROUND, link=link))
                self._outermost.setdefault(module, []).append(named)

    def install(self, model: nn.Module) -> None:
        """Compose and install all chains.

        Raises:
            HookError: See ``forward_chain.install``.
        """
        order = [_PLATFORM, *self._manifests]
        chains = {module: in_order(links, order) for module, links in self._links.items()}
        for module, links in self._outermost.items():
            chains[module] = [*chains.get(module, ()), *links]
        install(model, chains)

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
        named = self._named(hook, NamedLink(name=plugin, place=place, link=link))
        self._links.setdefault(held[name], []).append(named)

    def _named(self, hook: str, named: NamedLink) -> NamedLink:
        """Name the exceptions of a link."""
        wrap = self._hooks.naming(hook, named.name).around(partial(wrap_forward, named))
        return attrs.evolve(named, link=attrs.evolve(named.link, wrap=wrap))


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
