"""FLOPs of matmuls, by part of a layer.

A matmul of [T, H] with a weight of n elements has 2 n T FLOPs in forward and twice as many in
backward. Attention adds two matmuls over all pairs of a query and a key that it attends to, half of
all pairs under a causal mask; the backward of a fused kernel has five, since it recomputes the
scores: three over the width of a key and two over the width of a value. Elementwise operations are
not counted. Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1, halved for the causal
mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ascend_run.plugin_api.contracts import ParameterCost
from ascend_run.plugin_api.layer_window import layer_window
from ascend_run.types.config import RunConfig

from .sizes import Sizes

_BACKWARD = 2.0
"""Ratio to the forward, without recomputation inside of kernels, which does not count in MFU."""


def forward_flops(
    config: RunConfig, sizes: Sizes, parameters: Sequence[ParameterCost], layer: int
) -> dict[str, float]:
    """Return part of one layer -> FLOPs of its forward for one micro-batch on one rank."""
    found: dict[str, float] = {}
    for parameter in parameters:
        if parameter.layer == layer and parameter.is_matrix:
            found[parameter.part] = found.get(parameter.part, 0.0) + (
                2.0 * parameter.numel * rows_of(parameter, sizes)
            )
    found["self_attention"] = found.get("self_attention", 0.0) + attention_flops(
        config, sizes, layer
    )
    return found


def attention_flops(config: RunConfig, sizes: Sizes, layer: int) -> float:
    """Return the forward FLOPs of both attention matmuls, for one layer and micro-batch."""
    keys = keys_seen(sizes.sequence, layer_window(config.model, layer))
    return 2.0 * sizes.tokens * keys * (sizes.query_width + sizes.out_width)


def scores_flops(config: RunConfig, sizes: Sizes, layer: int) -> float:
    """Return the forward FLOPs of a layer's scores, which backward recomputes."""
    keys = keys_seen(sizes.sequence, layer_window(config.model, layer))
    return 2.0 * sizes.tokens * keys * sizes.query_width


def step_attention_flops(config: RunConfig, sizes: Sizes, layers: Iterable[int]) -> float:
    """Return the FLOPs of attention in a step: forward and backward of all micro-batches."""
    return sizes.num_microbatches * sum(
        (1 + _BACKWARD) * attention_flops(config, sizes, layer) + scores_flops(config, sizes, layer)
        for layer in layers
    )


def keys_seen(sequence: int, window: Sequence[int] | None) -> float:
    """Return the mean number of keys that a query attends to under a causal mask."""
    reach = sequence if not window or window[0] < 0 else min(sequence, window[0] + 1)
    return reach * (sequence - (reach - 1) / 2) / sequence


def output_flops(sizes: Sizes) -> float:
    """Return the forward FLOPs of the output layer, which is fused with the loss: once for the next
    token, and once for each depth of multi-token prediction."""
    losses = 1 + len(sizes.mtp_layers)
    return 2.0 * losses * sizes.tokens * sizes.hidden * sizes.valid_vocab


def changed_flops(
    sizes: Sizes,
    parameters: Sequence[ParameterCost],
    num_plain: int,
    repeated: Collection[tuple[int | None, str]],
) -> tuple[float, float]:
    """Return the change of a micro-batch's FLOPs through frozen and added parameters.

    A frozen weight has no gradient, but its input has one, since earlier parameters may be trained.

    Args:
        parameters: After all changes; the plain model's first, in its order.
        num_plain: Number of the plain model's parameters.
        repeated: (layer, part) of every forward that is recomputed in backward.

    Returns:
        Difference to the plain model: hardware FLOPs, model FLOPs.
    """
    hardware = model = 0.0
    for index, parameter in enumerate(parameters):
        if not parameter.is_matrix or parameter.layer is None:
            continue
        matmul = 2.0 * parameter.numel * rows_of(parameter, sizes)
        gradient = matmul if parameter.trained else 0.0
        if index < num_plain:
            model += gradient - matmul
            continue
        model += 2 * matmul + gradient  # forward, input gradient, weight gradient
        hardware += matmul if (parameter.layer, parameter.part) in repeated else 0.0
    return hardware + model, model


def rows_of(parameter: ParameterCost, sizes: Sizes) -> float:
    """Return the rows that a weight is multiplied with; for an expert, those dispatched to it."""
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
    forward_only: bool = False,
) -> float:
    """Return the FLOPs of a step on one rank: forward and backward of all micro-batches.

    Args:
        by_layer: From ``forward_flops``.
        model_only: Model FLOPs only, without the scores that backward recomputes.
        forward_only: Those of the forwards.
    """
    passes = 1 if forward_only else 1 + _BACKWARD
    total = passes * sum(sum(parts.values()) for parts in by_layer.values())
    if not (model_only or forward_only):
        total += sum(scores_flops(config, sizes, layer) for layer in by_layer)
    if has_output:
        total += passes * output_flops(sizes)
    return total * sizes.num_microbatches
