"""Forms of the keys of experts that differ from those in ``[model]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.plugin_api import FieldSection, KeyForm
from ascend_run.plugin_api.expert_layers import moe_layers


def _flags(dense: int, values: Mapping[str, Any]) -> Any:
    layers = values["model.num_layers"]
    return [int(layer >= dense) for layer in range(layers)] if dense else 1


def _dense_layers(_: object, model: FieldSection) -> int:
    layers, experts = model.num_layers, moe_layers(model)
    dense: int = layers - len(experts)
    if experts != {*range(dense, layers)}:
        raise ValueError("only the first layers can be without experts")
    return dense


def _widths(shared: int | None, model: FieldSection) -> int:
    count, rest = divmod(shared or 0, width := model.moe_ffn_hidden_size)
    if rest:
        raise ValueError(f"expected a multiple of {width}, an expert's")
    return int(count)


def _kept_groups(method: str, values: Mapping[str, Any]) -> Any:
    if method == "greedy":
        return None
    groups, kept = (values.get(f"model.moe_router_{name}") for name in ("num_groups", "group_topk"))
    if method != "group_limited_greedy" or not (groups and kept):
        raise ValueError("expected greedy, or group_limited_greedy with n_group and topk_group")
    return kept


DENSE_LAYERS_FIRST: Final = KeyForm(
    name="dense_layers_first", to_ours=_flags, to_theirs=_dense_layers, least=0
)
"""Number of leading layers without experts; ours has a flag per layer."""
EXPERT_WIDTHS: Final = KeyForm(
    name="expert_widths",
    to_ours=lambda count, values: count * values["model.moe_ffn_hidden_size"] or None,
    to_theirs=_widths,
    least=0,
)
"""Size of the shared experts in multiples of an expert's; ours is their size."""
GROUPS: Final = KeyForm(
    name="groups",
    to_ours=lambda count, values: count,
    to_theirs=lambda count, model: count or model.moe_router_num_groups or 1,
)
"""Number of groups of experts, or of those that a token selects from, by default all of them: one
group of all experts selects as none. Theirs is never null."""
TOPK_METHOD: Final = KeyForm(
    name="topk_method",
    to_ours=_kept_groups,
    to_theirs=lambda kept, model: "group_limited_greedy" if kept else "greedy",
)
"""``greedy`` ignores groups of experts; ours is null then."""
