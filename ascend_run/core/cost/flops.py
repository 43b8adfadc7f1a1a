"""Multiplications and additions in matrix products, by part of a layer.

A product of [T, H] with a weight of n numbers is 2 n T FLOPs in forward and twice that in
backward. Attention adds two products over the pairs of a query and a key that it sees, half of all
pairs under a causal mask; a fused kernel takes five in backward, as it computes the scores again:
three of them over the width of a key, and two over that of a value.
What is elementwise is not counted. Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1,
halved for the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ParameterCost

from .sizes import Sizes

_BACKWARD = 2.0
"""Times the forward; what a kernel computes again is not in it, nor is it in MFU."""


def forward_flops(
    config: RunConfig, sizes: Sizes, parameters: Sequence[ParameterCost], layer: int
) -> dict[str, float]:
    """Part of one layer -> FLOPs of its forward of one micro-batch on one rank."""
    found: dict[str, float] = {}
    for parameter in parameters:
        if parameter.layer == layer and parameter.is_matrix:
            found[parameter.part] = found.get(parameter.part, 0.0) + (
                2.0 * parameter.numel * rows_of(parameter.part, sizes)
            )
    found["self_attention"] = found.get("self_attention", 0.0) + attention_flops(config, sizes)
    return found


def attention_flops(config: RunConfig, sizes: Sizes) -> float:
    """Scores and their product with the values, forward, one layer and micro-batch."""
    keys = keys_seen(sizes.sequence, config.model.window_size)
    return 2.0 * sizes.tokens * keys * (sizes.query_width + sizes.out_width)


def scores_flops(config: RunConfig, sizes: Sizes) -> float:
    """The scores alone, which backward computes again."""
    keys = keys_seen(sizes.sequence, config.model.window_size)
    return 2.0 * sizes.tokens * keys * sizes.query_width


def step_attention_flops(config: RunConfig, sizes: Sizes, layers: int) -> float:
    """The same, forward and backward of all micro-batches of a step."""
    one = (1 + _BACKWARD) * attention_flops(config, sizes) + scores_flops(config, sizes)
    return layers * sizes.num_micro_batches * one


def keys_seen(sequence: int, window: Sequence[int] | None) -> float:
    """How many keys a query sees, on average, under a causal mask."""
    reach = sequence if not window or window[0] < 0 else min(sequence, window[0] + 1)
    return reach * (sequence - (reach - 1) / 2) / sequence


def output_flops(sizes: Sizes) -> float:
    """The output projection, forward; it is computed inside the loss."""
    return 2.0 * sizes.tokens * sizes.hidden * sizes.valid_vocab


def rows_of(part: str, sizes: Sizes) -> float:
    """Rows that each number of a weight is multiplied with; of an expert's, those sent to it."""
    if part == "experts":
        return sizes.expert_rows / sizes.experts
    return sizes.shared_tokens if part == "router" else sizes.tokens


def step_flops(
    config: RunConfig,
    sizes: Sizes,
    by_layer: dict[int, dict[str, float]],
    *,
    has_output: bool,
    model_only: bool = False,
) -> float:
    """Forward and backward of all micro-batches of a step on one rank.

    Args:
        by_layer: From ``forward_flops``.
        model_only: What the model asks for, without the scores that backward computes again.
    """
    forward = sum(sum(parts.values()) for parts in by_layer.values())
    total = forward * (1 + _BACKWARD)
    if not model_only:
        total += scores_flops(config, sizes) * len(by_layer)
    if has_output:
        total += output_flops(sizes) * (1 + _BACKWARD)
    return total * sizes.num_micro_batches
