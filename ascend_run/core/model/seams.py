"""Where module wrappers reach into a built model: one table, one walk.

A wrapper takes a module and answers its replacement (often the same module with another forward);
the kernel puts it in the module's place. State-dict keys must stay, which is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import HookError

from .places import is_empty


def _layer_seams(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(hook, parent, attribute) inside one layer, inner parts before the parts that hold them."""
    is_moe = hasattr(layer.mlp, "router")
    if is_moe:
        yield "ascend_token_dispatcher", layer.mlp, "token_dispatcher"
    yield "ascend_self_attention", layer, "self_attention"
    yield "ascend_moe_layer" if is_moe else "ascend_mlp", layer, "mlp"


def _linears(layer: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name in the layer, parent, attribute) of every parallel linear."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            parent, _, attribute = name.rpartition(".")
            found.append((name, layer.get_submodule(parent), attribute))
    return found


def wrap_modules(model: nn.Module, hooks: Hooks, ops: c.PlatformOps, **arguments: Any) -> nn.Module:
    """Apply every module wrapper to one model chunk, inner seams first.

    Args:
        ops: The model's table of operators, which wrappers of linears are asked with too.
        arguments: Those that every hook of the model build is asked with.

    Raises:
        HookError: A wrapper lost state-dict keys of what it wraps; it may add some.
    """

    def wrapped(hook: str, what: str, inner: Any, /, **place: Any) -> Any:
        before = _keys(inner)  # a wrapper may change the module itself
        outer = hooks.wrap(hook, inner, **arguments, **place)
        after = _keys(outer)
        if not before <= after:
            raise HookError(
                f"{hook}: a wrapper changed the parameter names of {what}",
                [f"before: {sorted(before)}", f"after: {sorted(after)}"],
            )
        return outer

    def replace(hook: str, parent: nn.Module, attribute: str, **place: Any) -> None:
        inner = getattr(parent, attribute)
        outer = wrapped(hook, attribute, inner, **place)
        if outer is not inner:
            setattr(parent, attribute, outer)

    if model.pre_process:
        replace("ascend_embedding", model, "embedding")
    layers = model.decoder.layers
    for position, layer in enumerate(layers):
        if is_empty(layer):
            continue
        index = layer.layer_number - 1
        for name, parent, attribute in _linears(layer):
            replace("ascend_linear", parent, attribute, name=name, layer_index=index, ops=ops)
        for hook, parent, attribute in _layer_seams(layer):
            replace(hook, parent, attribute, layer_index=index)
        replace(
            "ascend_layer",
            layers,
            str(position),
            layer_index=index,
            num_layers=model.config.num_layers,
        )
    if model.post_process:
        replace("ascend_output_layer", model, "output_layer")
    return wrapped("ascend_model", "the model", model)


def _keys(part: Any) -> set[str]:
    """Of its state dict; a token dispatcher is no module and has none."""
    return set(part.state_dict()) if isinstance(part, nn.Module) else set()
