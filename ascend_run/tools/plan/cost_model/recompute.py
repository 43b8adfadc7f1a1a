"""Recomputation by Megatron (``recompute_granularity``) and by ``ascend_activation_policy``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ascend_run.core.config.activation_policy import LayerPolicy
from ascend_run.plugin_api.contracts import Keeping, Storage
from ascend_run.types.config import RunConfig

from .ledger import Ledger, Saved

_EVERYTHING: Final = ("*",)
_FEED_FORWARD: Final = ("mlp", "router", "dispatcher", "experts", "shared_experts")
_RECOMPUTED: Final[Mapping[str, tuple[str, ...]]] = {
    "": _EVERYTHING,
    "input_layernorm": ("input_norm",),
    "self_attention": ("self_attention",),
    "pre_mlp_layernorm": ("mlp_norm",),
    "mlp": _FEED_FORWARD,
    "mlp.shared_experts": ("shared_experts",),
}
"""Part of a layer that a plugin recomputes -> parts of the ledger."""
_ACTIVATED: Final = ("activated", "clamped", "sigmoid", "product")
_ACTIVATIONS: Final = {
    "mlp.activation_func": "mlp",
    "mlp.shared_experts.activation_func": "shared_experts",
}
"""Activation function -> the part of the ledger with its input, ``hidden``."""
_DISCARDED: Final[Mapping[str, tuple[str, ...]]] = {
    "input_layernorm": ("self_attention.input",),
    "pre_mlp_layernorm": ("mlp.input", "router.input", "shared_experts.input"),
    **{
        function: tuple(f"{part}.{name}" for name in _ACTIVATED)
        for function, part in _ACTIVATIONS.items()
    },
}
"""Part whose output a plugin discards -> tensors that are not saved."""
_MODULES: Final = {
    "mlp": ("mlp",),
    "moe": ("router", "dispatcher", "experts", "shared_experts"),
    "shared_experts": ("shared_experts",),
}
"""Name in ``recompute_modules`` -> parts that are recomputed."""


def recompute_as_configured(
    config: RunConfig, ledger: Ledger, chunks: Sequence[Sequence[int]]
) -> None:
    """Apply the recomputation of ``[model]`` to the ledger, before any plugin's change."""
    model = config.model
    if model.recompute_granularity == "full":
        number = model.recompute_num_layers or 1
        depths = {layer for layers in chunks for layer in layers if layer >= model.num_layers}
        ledger.recompute(_EVERYTHING, [(layer,) for layer in sorted(depths)])
        for every in chunks:
            layers = [layer for layer in every if layer not in depths]
            if model.recompute_method == "block":
                groups = [layers[i : i + 1] for i in range(min(number, len(layers)))]
            else:
                groups = [layers[i : i + number] for i in range(0, len(layers), number)]
            ledger.recompute(_EVERYTHING, groups)
    elif model.recompute_granularity == "selective":
        for module in model.recompute_modules or ("core_attn",):
            if module == "core_attn":
                _without_core_attention(ledger)
            else:
                parts = _MODULES.get(module, ())
                ledger.recompute(parts, [(layer,) for layer in ledger.saved])


def treat_as_plugins_do(ledger: Ledger, policies: Mapping[int, LayerPolicy]) -> None:
    """Apply what plugins recompute or discard; what they move is in their own changes."""
    for layer in ledger.saved:
        for part, (_, treatment) in policies[layer].treated.items():
            if treatment.links is None or treatment.keeping is Keeping.OFFLOAD:
                continue
            ledger.recompute(_RECOMPUTED.get(part, ()), [(layer,)])
            if treatment.keeping is Keeping.DISCARD:
                if part in _ACTIVATIONS:
                    _save_hidden(ledger.saved[layer], _ACTIVATIONS[part])
                ledger.discard(_DISCARDED.get(part, ()), layer)


def _save_hidden(saved: list[Saved], part: str) -> None:
    """Save the input of an activation function, which the backward of some, such as a squared ReLU,
    does not read: it is what the output is recomputed from."""
    at = {tensor.name: index for index, tensor in enumerate(saved) if tensor.part == part}
    if "product" in at and "hidden" not in at:
        size = saved[at["product"]].nbytes
        saved.insert(at["input"] + 1, Saved(part=part, name="hidden", nbytes=size, added=True))


def _without_core_attention(ledger: Ledger) -> None:
    """Queries, keys and values are saved, and the attention kernel is recomputed."""
    for layer, saved in ledger.saved.items():
        for tensor in saved:
            if tensor.key in ("self_attention.out", "self_attention.lse"):
                tensor.storage, tensor.again = Storage.NONE, layer
