"""Multiplications and additions in matrix products, by part of a layer.

A product of [T, H] with a weight of n numbers is 2 n T FLOPs in forward and twice that in
backward. Attention adds two products over the pairs of a query and a key that it sees, half of all
pairs under a causal mask; a fused kernel takes five in backward, as it computes the scores again:
three of them over the width of a key, and two over that of a value.
What is elementwise is not counted. Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1,
halved for the causal mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
                2.0 * parameter.numel * rows_of(parameter, sizes)
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


def changed_flops(
    sizes: Sizes,
    parameters: Sequence[ParameterCost],
    num_plain: int,
    repeated: Collection[tuple[int | None, str]],
) -> tuple[float, float]:
    """What plugins change in the products of one micro-batch by what they freeze and add.

    A frozen weight has no gradient, but what enters it has one, for what is trained before it.

    Args:
        parameters: After all changes; the plain model's first, in its order.
        num_plain: How many of them are the plain model's.
        repeated: (layer, part) of every forward that runs again in backward.

    Returns:
        FLOPs more than the plain model's: computed, and asked for by the model.
    """
    computed = asked = 0.0
    for place, parameter in enumerate(parameters):
        if not parameter.is_matrix or parameter.layer is None:
            continue
        product = 2.0 * parameter.numel * rows_of(parameter, sizes)
        gradient = product if parameter.trained else 0.0
        if place < num_plain:
            asked += gradient - product
            continue
        asked += 2 * product + gradient  # forward, and the gradient of what enters
        computed += product if (parameter.layer, parameter.part) in repeated else 0.0
    return computed + asked, asked


def rows_of(parameter: ParameterCost, sizes: Sizes) -> float:
    """Rows that each number of a weight is multiplied with; of an expert's, those sent to it."""
    if parameter.part == "experts":
        return sizes.expert_rows / sizes.experts
    return sizes.shared_tokens if parameter.sees_own_tokens else sizes.tokens


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
