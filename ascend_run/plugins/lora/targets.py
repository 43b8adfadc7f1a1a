"""Which parts of which linears are adapted, and what they are called elsewhere. No torch.

Megatron keeps the projections of queries, keys and values in one linear, and those of gate and up
in another. Each of them has an adapter of its own here, as in Hugging Face's models, where they are
linears of their own: so PEFT's files and ours hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

ALL: Final = "all-linear"

LINEARS: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "self_attention.linear_proj": ("linear_proj",),
    "mlp.linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "mlp.linear_fc2": ("linear_fc2",),
}
"""Linear in a layer -> its parts, in Megatron's order. An fc1 without a gate is one part."""

FEED_FORWARD: Final = ("linear_fc1", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")

_LLAMA: Final[Mapping[str, str]] = {
    "linear_q": "self_attn.q_proj",
    "linear_k": "self_attn.k_proj",
    "linear_v": "self_attn.v_proj",
    "linear_proj": "self_attn.o_proj",
    "linear_fc1_gate": "mlp.gate_proj",
    "linear_fc1_up": "mlp.up_proj",
    "linear_fc2": "mlp.down_proj",
}
PEFT_NAMES: Final[Mapping[str, Mapping[str, str]]] = {"llama": _LLAMA, "mixtral": _LLAMA}
"""Family -> part -> module in a layer of Hugging Face's model."""


def linear_parts(name: str, config: RunConfig) -> tuple[str, ...]:
    """The parts of a linear by its name in the layer; none where it takes no adapter."""
    if name == "mlp.linear_fc1" and not config.model.gated_linear_unit:
        return ("linear_fc1",)
    return LINEARS.get(name, ())


def wanted_parts(targets: Sequence[str], name: str, config: RunConfig) -> tuple[str, ...]:
    """Those of a linear's parts that ``target_modules`` names, in Megatron's order."""
    short = name.rpartition(".")[2]
    return tuple(
        part
        for part in linear_parts(name, config)
        if ALL in targets or short in targets or part in targets
    )


def known_targets(config: RunConfig) -> list[str]:
    """Every name that ``target_modules`` may hold."""
    names = [ALL]
    for linear in LINEARS:
        names += [linear.rpartition(".")[2], *linear_parts(linear, config)]
    return list(dict.fromkeys(names))


def peft_module(part: str, layer_index: int, family: str) -> str:
    """The module that PEFT adapts, by its name in Hugging Face's model."""
    return f"model.layers.{layer_index}.{PEFT_NAMES[family][part]}"


def adapted(targets: Sequence[str], config: RunConfig) -> list[str]:
    """The parts that a model with these targets has, in some layer."""
    return [
        part
        for linear in LINEARS
        if not (linear.startswith("mlp.") and only_experts(config))
        for part in wanted_parts(targets, linear, config)
    ]


def only_experts(config: RunConfig) -> bool:
    """Whether every layer's feed-forward is one of experts."""
    if not config.model.num_moe_experts:
        return False
    frequency = config.model.get("moe_layer_freq", 1)
    return frequency == 1 or (isinstance(frequency, list) and all(frequency))
