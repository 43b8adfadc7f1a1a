"""The parts of linears that can be adapted, and their names in other formats. No torch.

Megatron fuses the projections of queries, keys and values into one linear, and those of gate and up
into another. Each of them has its own adapter here, as in Hugging Face's models, where they are
separate linears: so PEFT's files and ours hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from ascend_run.ops.linear.adapter_parts import selectors
from ascend_run.plugin_api.expert_layers import moe_layers

from .peft_names import PEFT_NAMES

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

ALL: Final = "all-linear"

LINEARS: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "self_attention.linear_q_proj": ("linear_q_proj",),
    "self_attention.linear_q_down_proj": ("linear_q_down_proj",),
    "self_attention.linear_q_up_proj": ("linear_q_up_proj",),
    "self_attention.linear_kv_down_proj": ("linear_kv_down_proj",),
    "self_attention.linear_kv_up_proj": ("linear_kv_up_proj",),
    "self_attention.linear_proj": ("linear_proj",),
    "mlp.linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "mlp.linear_fc2": ("linear_fc2",),
    "mlp.shared_experts.linear_fc1": ("shared_experts_fc1_gate", "shared_experts_fc1_up"),
    "mlp.shared_experts.linear_fc2": ("shared_experts_fc2",),
}
"""Linear in a layer -> its parts, in Megatron's order. An fc1 without a gate is one part; no model
has both ``linear_qkv`` and the projections of latents."""

SHARED_EXPERTS: Final = (
    *("shared_experts", "shared_experts_fc1", "shared_experts_fc2"),
    *("shared_experts_fc1_gate", "shared_experts_fc1_up"),
)
"""Targets of shared experts alone; those of ``FEED_FORWARD`` select their linears, too."""

EXPERTS: Final = "experts"
EXPERT_PARTS: Final[Mapping[str, str]] = {
    "experts_fc1": "gate_up_proj",
    "experts_fc2": "down_proj",
}
"""Stacked weight of the routed experts -> PEFT's target parameter of ``PEFT_EXPERTS``. They are
adapted if named, as PEFT's ``target_parameters``."""
PEFT_EXPERTS: Final = "mlp.experts"
"""Module of a layer of Hugging Face's model that has the experts, in every family with such."""

FEED_FORWARD: Final = ("linear_fc1", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")

_FUSED_IN_PEFT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qkv_proj", "W_pack", "query_key_value", "c_attn"), "linear_qkv"),
    "gate_up_proj": "linear_fc1",
    **dict.fromkeys(("dense_h_to_4h", "c_fc"), "linear_fc1"),
    "dense_4h_to_h": "linear_fc2",
}
"""Last names of modules of Hugging Face's models that are a whole linear here -> the linear."""


def model_linears(config: RunConfig) -> list[str]:
    """Return the keys of ``LINEARS`` that layers of this model have."""
    model = config.model
    queries = ["linear_q_down_proj", "linear_q_up_proj"]
    if not model.q_lora_rank:
        queries = ["linear_q_proj"]
    attention = ["linear_qkv"]
    if model.multi_latent_attention:
        attention = [*queries, "linear_kv_down_proj", "linear_kv_up_proj"]
    present = {f"self_attention.{name}" for name in (*attention, "linear_proj")}
    blocks = ("mlp", *(["mlp.shared_experts"] if has_shared_experts(config) else []))
    return [name for name in LINEARS if name in present or name.rpartition(".")[0] in blocks]


def linear_parts(name: str, config: RunConfig) -> tuple[str, ...]:
    """Return the parts of a linear by its name in the layer; empty if it takes no adapter."""
    parts = LINEARS.get(name, ())
    if name.endswith(".linear_fc1") and not config.model.gated_linear_unit:
        return tuple({part.removesuffix("_gate").removesuffix("_up"): None for part in parts})
    return parts


def names_of(part: str) -> tuple[str, ...]:
    """Return the names of options that mean a part, its own first."""
    return tuple(dict.fromkeys((*selectors(part), linear_of(part))))


def wanted_parts(targets: Sequence[str], name: str, config: RunConfig) -> tuple[str, ...]:
    """Return the parts of a linear that ``target_modules`` names, in Megatron's order."""
    return tuple(
        part
        for part in linear_parts(name, config)
        if ALL in targets or not {*targets}.isdisjoint(names_of(part))
    )


def wanted_experts(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the weights of experts that ``target_modules`` names."""
    return tuple(part for part in EXPERT_PARTS if EXPERTS in targets or part in targets)


def known_targets(config: RunConfig) -> list[str]:
    """Return every name that ``target_modules`` accepts."""
    names = [ALL]
    for linear in model_linears(config):
        for part in linear_parts(linear, config):
            names += reversed(names_of(part))
    if moe_layers(config.model):
        names += [EXPERTS, *EXPERT_PARTS]
    return list(dict.fromkeys(names))


def hint(name: str, known: Collection[str]) -> str:
    """Return what a name of PEFT's means among the targets of the model; empty for other names."""
    ends: dict[str, list[str]] = {end: [ours] for end, ours in _FUSED_IN_PEFT.items()}
    for part, module in chain(*(names.items() for names in PEFT_NAMES.values())):
        # Of names that end alike, those of an MLP mean shared experts, too.
        if not part.startswith("shared_experts"):
            ends.setdefault(module.rpartition(".")[2], []).append(part)
    means = [ours for ours in ends.get(name, []) if ours in known]
    return f" (did you mean {means[0]}, as PEFT's {name} is named here?)" if means else ""


def peft_module(part: str, layer_index: int, family: str, parts: Sequence[str] = ()) -> str:
    """Return the name of the module that PEFT adapts in Hugging Face's model.

    Args:
        parts: Every adapted part. PEFT nests its wrappers of several parameters of one module.
    """
    names = {**PEFT_NAMES[family], **dict.fromkeys(EXPERT_PARTS, PEFT_EXPERTS)}
    is_nested = part == "experts_fc1" and "experts_fc2" in parts
    return f"model.layers.{layer_index}.{names[part]}{'.base_layer' if is_nested else ''}"


def peft_name_in_layer(part: str, family: str) -> str:
    """Return the name of a part's module in a layer of Hugging Face's model, for experts of the
    stacked weight."""
    if part in EXPERT_PARTS:
        return f"{PEFT_EXPERTS}.{EXPERT_PARTS[part]}"
    return PEFT_NAMES[family][part]


def frozen_names(parts: Sequence[str], config: RunConfig) -> list[str]:
    """Return the names in a layer of Hugging Face's model of its linears without an adapter.

    Those of routed experts end as the names of a dense MLP's do.
    """
    absent = () if has_shared_experts(config) else "shared_experts"
    names = {n: p for n, p in PEFT_NAMES[config.model.family].items() if not n.startswith(absent)}
    found = [name for part, name in names.items() if part not in parts]
    if moe_layers(config.model):
        dense = [name for part, name in names.items() if part.startswith("linear_fc")]
        found += [name.replace("mlp.", f"{PEFT_EXPERTS}.") for name in dense]
    return found


def adapted(targets: Sequence[str], config: RunConfig) -> list[str]:
    """Return the adapted parts that exist in at least one layer of the model."""
    parts = [
        part
        for linear in model_linears(config)
        if not (linear.startswith("mlp.linear_") and only_experts(config))
        for part in wanted_parts(targets, linear, config)
    ]
    return [*parts, *(wanted_experts(targets) if moe_layers(config.model) else ())]


def unnamed_parts(targets: Sequence[str], config: RunConfig) -> list[str]:
    """Return the adapted parts without a name in Hugging Face's model of the family."""
    names = {*PEFT_NAMES.get(config.model.family, {}), *EXPERT_PARTS}
    return [part for part in adapted(targets, config) if part not in names]


def linear_of(part: str) -> str:
    """Return the linear that a part belongs to, without its block."""
    if part in EXPERT_PARTS:
        return EXPERTS
    found = (name for name, parts in LINEARS.items() if part in parts)
    return next(found, selectors(part)[-1]).rpartition(".")[2]


def has_shared_experts(config: RunConfig) -> bool:
    """Return whether a layer has shared experts."""
    return bool(config.model.moe_shared_expert_intermediate_size and moe_layers(config.model))


def only_experts(config: RunConfig) -> bool:
    """Return whether the MLP of every layer is a mixture of experts."""
    num_layers: int = config.model.num_layers
    return len(moe_layers(config.model)) == num_layers
