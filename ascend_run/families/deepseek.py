"""DeepSeek's experts: dense layers first, then layers of routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.plugin_api import Condition, ConfigKey, TensorMap

from .decoder import HF_LAYER, LAYER
from .expert_forms import DENSE_LAYERS_FIRST, EXPERT_WIDTHS, GROUPS
from .experts import expert_tensors

_MLP: Final = f"{LAYER}.mlp"
_HF_MLP: Final = f"{HF_LAYER}.mlp"
_SHARED: Final = Condition("model.moe_shared_expert_intermediate_size", ">", 0)


def deepseek_expert_keys(
    *, experts: int, width: int, shared: int, dense: int, factor: float
) -> tuple[ConfigKey, ...]:
    """Return the keys of the experts and of which layers have them, with their defaults.

    Args:
        experts, width: Number of routed experts, and the FFN size of each.
        shared: Number of shared experts.
        dense: Number of leading layers without experts.
        factor: Factor on the weights of the selected experts.
    """
    return (
        ConfigKey(hf="n_routed_experts", field="model.num_moe_experts", default=experts),
        ConfigKey(hf="num_experts_per_tok", field="model.moe_router_topk"),
        ConfigKey(hf="moe_intermediate_size", field="model.moe_ffn_hidden_size", default=width),
        ConfigKey(
            hf="routed_scaling_factor",
            field="model.moe_router_topk_scaling_factor",
            default=factor,
        ),
        ConfigKey(
            hf="first_k_dense_replace",
            field="model.moe_layer_freq",
            default=dense,
            form=DENSE_LAYERS_FIRST,
        ),
        ConfigKey(
            hf="n_shared_experts",
            field="model.moe_shared_expert_intermediate_size",
            default=shared,
            form=EXPERT_WIDTHS,
        ),
    )


def group_keys(num_groups: int | None, kept: int | None) -> tuple[ConfigKey, ...]:
    """Return the keys of the groups of experts and of how many a token selects, with defaults.

    A class with a default number of groups has no model without: one group is written then.
    """
    form = GROUPS if num_groups else None
    return tuple(
        ConfigKey(hf=hf, field=f"model.moe_router_{name}", default=value, nullable=True, form=form)
        for hf, name, value in (
            ("n_group", "num_groups", num_groups),
            ("topk_group", "group_topk", kept),
        )
    )


def deepseek_expert_tensors() -> Iterator[TensorMap]:
    """Yield the MLPs of dense layers, the router, the routed and the shared experts."""
    yield from _gated(_MLP, _HF_MLP, "dense", None)
    yield from expert_tensors(layers="experts")
    yield from _gated(f"{_MLP}.shared_experts", f"{_HF_MLP}.shared_experts", "experts", _SHARED)


def _gated(ours: str, theirs: str, layers: str, condition: Condition | None) -> Iterator[TensorMap]:
    """Yield the tensors of a gated MLP, for layers of one kind."""
    for name, parts, form in (
        ("linear_fc1", ("gate_proj", "up_proj"), "concat"),
        ("linear_fc2", ("down_proj",), "copy"),
    ):
        yield TensorMap(
            megatron=f"{ours}.{name}.weight",
            hf=tuple(f"{theirs}.{part}.weight" for part in parts),
            form=form,
            layers=layers,
            condition=condition,
        )
