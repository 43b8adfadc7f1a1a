"""Compose what plugins do with the activations of each layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import ActivationTreatment, Keeping
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig

from .stages import stage_layers

HOOK: Final = "ascend_activation_policy"
PARTS: Final = (
    *("", "input_layernorm", "self_attention", "self_attention.core_attention"),
    *("pre_mlp_layernorm", "mlp", "mlp.activation_func"),
    *("mlp.shared_experts", "mlp.shared_experts.activation_func"),
)
"""Parts of a layer, by the names of their modules."""
Treated: TypeAlias = tuple[str, ActivationTreatment]
"""A treatment and its owner: a plugin, or the option of Megatron's own."""
_RECOMPUTED: Final = ActivationTreatment(Keeping.RECOMPUTE)


@attrs.frozen
class LayerPolicy:
    """What is done with the activations of one layer, by part."""

    treated: Mapping[str, Treated]
    overruled: Mapping[str, tuple[Treated, str]]
    """Parts within one that is recomputed, with the owner of that one."""
    twice: tuple[tuple[str, str, str], ...]
    """Part, and two owners that treat it."""
    without: frozenset[str]
    """Plugins that treat no part of this layer."""


def activation_policies(config: RunConfig, hooks: Hooks) -> dict[int, LayerPolicy]:
    """Return layer index -> policy; empty slots have none. The config must pass ``stage_problems``.

    Raises:
        HookError: A plugin names a part that no layer has.
    """
    model, slots = config.model, range(config.model.num_layers)
    empty = {*hooks.collect("ascend_empty_layers", key=str, config=config)}
    depths = range(len(slots), len(slots) + (model.mtp_num_layers or 0))
    moe = moe_layers(model)
    if max({*slots} - empty, default=-1) in moe:  # the depths are like the last layer
        moe |= {*depths}
    policies, stages = {}, stage_layers(config)
    for chunks in stages:
        for chunk, layers in enumerate(chunks):
            held = [n for n in layers if n not in empty]
            held += depths if layers is stages[-1][-1] else ()
            for place, index in enumerate(held):
                named: dict[str, Any] = {"config": config, "layer_index": index, "place": place}
                named |= {"has_experts": index in moe, "chunk": chunk, "num_chunks": len(chunks)}
                slot = -1 if index in depths else index - layers.start
                given = [*_of_megatron(config, slot, has_experts=index in moe)]
                policies[index] = _composed([*given, *hooks.contributions(HOOK, **named)])
    return policies


def _of_megatron(
    config: RunConfig, slot: int, *, has_experts: bool
) -> Iterator[tuple[str, Mapping[str, ActivationTreatment]]]:
    """Yield what Megatron recomputes in a layer, by the option that says so.

    Args:
        slot: Index in its chunk, with empty slots; -1 for multi-token prediction.
    """
    model = config.model
    if model.recompute_granularity == "full":
        if slot < (model.recompute_num_layers or 1) or model.recompute_method != "block":
            yield "model.recompute_granularity", {"": _RECOMPUTED}
    elif model.recompute_granularity == "selective":
        parts = {"moe" if has_experts else "mlp": "mlp"}
        parts["core_attn"] = "self_attention.core_attention"
        parts |= {"shared_experts": "mlp.shared_experts"} if has_experts else {}
        named = model.recompute_modules or ("core_attn",)
        if treated := {parts[n]: _RECOMPUTED for n in named if n in parts}:
            yield "model.recompute_modules", treated


def _composed(given: Iterable[tuple[str, Mapping[str, ActivationTreatment]]]) -> LayerPolicy:
    found: dict[str, Treated] = {}
    twice, without = [], set()
    for owner, treatments in given:
        if not treatments:
            without.add(owner)
        for part, treatment in treatments.items():
            if part not in PARTS:
                raise HookError(f"{HOOK}: '{owner}' treats {part!r}; expected one of {PARTS}")
            if part in found:
                twice.append((part, found[part][0], owner))
            found.setdefault(part, (owner, treatment))
    recomputed = [part for part, (_, how) in found.items() if how.keeping is Keeping.RECOMPUTE]
    inside = {}
    for part, treated in found.items():
        around = [o for o in recomputed if o != part and part.startswith(o and f"{o}.")]
        if around:
            inside[part] = treated, found[min(around, key=len)][0]
    outermost = {part: treated for part, treated in found.items() if part not in inside}
    return LayerPolicy(outermost, inside, tuple(twice), frozenset(without))
