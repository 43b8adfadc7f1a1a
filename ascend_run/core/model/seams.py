"""Apply module wrappers to a built model: one table of seams, one walk.

A wrapper takes a module and returns a link around its forward, links around forwards of its
submodules, or a replacement module. State-dict keys must be preserved, which is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from ascend_run.core.config.activation_policy import LayerPolicy
from ascend_run.core.hooks import Hooks
from ascend_run.ops.linear.parallel_linear import linear_link
from ascend_run.ops.linear.stored_weight import stored_weight
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError
from ascend_run.types.forward import chain_of

from .collected_links import CollectedLinks
from .experts import call_experts_by_dispatcher
from .layer_slots import is_empty

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from .gpt import GPT


LINEARS: Final = (ColumnParallelLinear, RowParallelLinear)


def _layer_seams(layer: TransformerLayer) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (hook, parent, attribute) of one layer, submodules before their parents."""
    is_moe = hasattr(layer.mlp, "router")
    if is_moe:
        yield "ascend_token_dispatcher", layer.mlp, "token_dispatcher"
    yield "ascend_self_attention", layer, "self_attention"
    yield "ascend_moe_layer" if is_moe else "ascend_mlp", layer, "mlp"


def _layers(model: GPT) -> Iterator[tuple[nn.Module, str]]:
    """Yield (parent, attribute) of every transformer layer that is not an empty slot."""
    layers = model.decoder.layers
    yield from ((layers, str(at)) for at, layer in enumerate(layers) if not is_empty(layer))
    if model.mtp_process:
        yield from ((depth, "transformer_layer") for depth in model.mtp.layers)


def _linears(layer: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return (name in the layer, parent, attribute) of every parallel linear."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, LINEARS):
            parent, _, attribute = name.rpartition(".")
            found.append((name, layer.get_submodule(parent), attribute))
    return found


def layer_linears(model: GPT) -> Iterator[Any]:
    """Yield every parallel linear of the layers."""
    for parent, attribute in _layers(model):
        for _, holder, linear in _linears(getattr(parent, attribute)):
            yield getattr(holder, linear)


def wrap_modules(
    model: GPT,
    hooks: Hooks,
    ops: c.PlatformOps,
    policies: Mapping[int, LayerPolicy],
    *,
    device: c.Device,
    **arguments: Any,
) -> nn.Module:
    """Apply every module wrapper to one model chunk, inner seams first.

    Args:
        ops: The model's operator table. Linears use its matmul, and their wrappers get it.
        policies: What is done with the activations of each layer.
        arguments: Arguments that every hook of the model build takes, besides the device.

    Raises:
        HookError: A wrapper removed state-dict keys (it may add some), assigned a forward, or
            linked a forward that its plugin's manifest does not declare.
    """
    links = CollectedLinks(hooks)
    wrappers = _Wrappers(hooks, links, {"device": device, **arguments})
    if hasattr(model, "embedding"):
        wrappers.replace("ascend_embedding", model, "embedding")
    count = model.config.num_layers
    for parent, attribute in _layers(model):
        layer = cast("TransformerLayer", getattr(parent, attribute))
        index = layer.layer_number - 1
        linears = _linears(layer)
        if hasattr(parent, "eh_proj"):
            linears.insert(0, ("eh_proj", parent, "eh_proj"))
        for name, holder, linear in linears:
            module = getattr(holder, linear)
            stored = stored_weight(module.weight)
            own = {"matmul": ops.matmul, "weight": stored and stored.values}
            if own := {field: value for field, value in own.items() if value is not None}:
                links.add_platform(module, linear_link(module, **own))
            wrappers.replace("ascend_linear", holder, linear, name=name, layer_index=index, ops=ops)
        for hook, holder, seam in _layer_seams(layer):
            wrappers.replace(hook, holder, seam, layer_index=index)
            if seam == "token_dispatcher":
                call_experts_by_dispatcher(holder)
        links.keep(layer, policies[index], device)
        wrappers.replace("ascend_layer", parent, attribute, layer_index=index, num_layers=count)
    if hasattr(model, "output_layer"):
        wrappers.replace("ascend_output_layer", model, "output_layer")
    whole: nn.Module = wrappers.wrapped("ascend_model", "the model", model)
    links.install(whole)
    if hasattr(model, "output_layer"):
        model.fuses_loss &= _is_plain(model.output_layer)
    return whole


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a call of the output layer is nothing but a matmul with its weight."""
    forward_hooks = layer._forward_hooks or layer._forward_pre_hooks
    hooks = forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is ColumnParallelLinear and not (hooks or chain_of(layer).links)


@attrs.frozen
class _Wrappers:
    """The module wrappers of a run's plugins, with the arguments of one model build."""

    hooks: Hooks
    links: CollectedLinks
    arguments: Mapping[str, Any]

    def replace(self, hook: str, parent: nn.Module, attribute: str, **place: Any) -> None:
        """Wrap a submodule and replace it by the result."""
        inner = getattr(parent, attribute)
        outer = self.wrapped(hook, attribute, inner, **place)
        if outer is not inner:
            setattr(parent, attribute, outer)

    def wrapped(self, hook: str, what: str, inner: object, /, **place: Any) -> Any:
        """Apply all wrappers of one hook to a module; collect links around forwards.

        Args:
            what: Name of the module in error messages.
        """
        before = _keys(inner)  # a wrapper may modify the module in place
        outer = inner
        for plugin, wrapper in self.hooks.wrappers(hook, **self.arguments, **place):
            forwards = _forwards(outer)
            with self.hooks.naming(hook, plugin):
                outer = self.links.take(hook, plugin, outer, wrapper(outer))
                if name := next((n for m, (n, f) in forwards.items() if m.forward != f), None):
                    raise HookError(
                        f"{hook}: '{plugin}' assigned the forward of {name}; return a ForwardLink "
                        "instead, which is ordered with the other plugins' links"
                    )
        after = _keys(outer)
        if not before <= after:
            raise HookError(
                f"{hook}: a wrapper changed the parameter names of {what}",
                [f"before: {sorted(before)}", f"after: {sorted(after)}"],
            )
        return outer


def _forwards(part: object) -> dict[nn.Module, tuple[str, object]]:
    """Return the name and the forward of a module and of each of its submodules."""
    modules = part.named_modules() if isinstance(part, nn.Module) else ()
    return {module: (name or "what it wraps", module.forward) for name, module in modules}


def _keys(part: Any) -> set[str]:
    """Return the state-dict keys; a token dispatcher is not a module and has none."""
    return set(part.state_dict()) if isinstance(part, nn.Module) else set()
