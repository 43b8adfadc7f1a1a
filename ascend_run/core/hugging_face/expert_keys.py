"""Keys of experts whose values have another form in ``[model]``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig

from .derived_fields import model_value


def flags_of_dense(dense: int, values: Mapping[str, Any]) -> Any:
    """Return a flag of each layer for a number of leading layers without experts; 1 for 0."""
    layers = values["model.num_layers"]
    return [int(layer >= dense) for layer in range(layers)] if dense else 1


def dense_layers(_: object, config: RunConfig) -> int:
    """Return the inverse of ``flags_of_dense``.

    Raises:
        ValueError: Other layers have no experts.
    """
    layers, experts = config.model.num_layers, moe_layers(config.model)
    dense: int = layers - len(experts)
    if experts != {*range(dense, layers)}:
        raise ValueError("only the first layers can be without experts")
    return dense


def widths(shared: int | None, config: RunConfig) -> int:
    """Return the size of the shared experts in multiples of an expert's.

    Raises:
        ValueError: It is no multiple.
    """
    count, rest = divmod(shared or 0, width := model_value(config, "moe_ffn_hidden_size"))
    if rest:
        raise ValueError(f"expected a multiple of {width}, an expert's")
    return int(count)


def num_groups(given: int | None, config: RunConfig) -> int:
    """Return the number of groups of experts, or of those that a token selects from, by default all
    of them: one group of all experts selects as none."""
    return given or config.model.moe_router_num_groups or 1


def kept_groups(method: str, values: Mapping[str, Any]) -> Any:
    """Return the groups of experts that a ``topk_method`` keeps; None if it ignores groups.

    Raises:
        ValueError: It is another one, or there are no groups.
    """
    if method == "greedy":
        return None
    groups, kept = (values.get(f"model.moe_router_{name}") for name in ("num_groups", "group_topk"))
    if method != "group_limited_greedy" or not (groups and kept):
        raise ValueError("expected greedy, or group_limited_greedy with n_group and topk_group")
    return kept
