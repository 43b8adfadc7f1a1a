"""What is held from step to step: weights, gradients, the optimizer's state.

The rules are those of ``train.data_parallel`` and ``train.optimizer``: gradients in buffers of
float32 behind Megatron's DistributedDataParallel, or autograd's own where one rank holds it all;
AdamW with two moments, and a float32 copy of the weights under mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import ParameterCost
from ascend_run.plugin_api.layout import Layout

WIDE = 4
"""Bytes of float32: master weights, moments, buffers of gradients."""
_ALIGNED = 64
_BUCKET_UNIT = 128
_DEFAULT_BUCKET = 40_000_000
_BUCKET_OF_RANK = 1_000_000
_AFTER_LAYERS = ("final_norm", "output_layer")


@attrs.frozen(kw_only=True)
class State:
    """Bytes on one rank."""

    weights: float
    gradients: float
    """In buffers, for the length of the run; 0 where they are autograd's own."""
    gradient_item: int
    """Bytes of a number of a gradient that is not in a buffer; 0 where they are."""
    optimizer: float
    main_gradients: float
    """Float32 copies of gradients while the optimizer steps."""


def held_state(
    config: RunConfig,
    layout: Layout,
    parameters: Sequence[ParameterCost],
    item_bytes: int,
    num_micro_batches: int,
    *,
    pp_rank: int,
    chunks: Sequence[Sequence[int]],
) -> State:
    """The state of one kind of rank.

    Args:
        chunks: Layers of each chunk of its model.
    """
    trained = [p for p in parameters if p.trained]
    fixed = sum(p.numel for p in parameters if not p.trained)
    half = config.train.precision != "fp32"
    spread = config.ddp.use_distributed_optimizer
    if keeps_own_gradients(config, layout, num_micro_batches):
        numel = sum(p.numel for p in trained)
        return State(
            weights=(numel + fixed) * item_bytes,
            gradients=0,
            gradient_item=item_bytes,
            optimizer=_adam(numel, len(trained), half),
            main_gradients=numel * WIDE if half else 0,
        )
    weights, gradients, optimizer = fixed * item_bytes, 0.0, 0.0
    limit = bucket_size(config, layout, pp_rank)
    for is_expert, ranks in ((False, layout.dp * layout.cp), (True, layout.expt_dp)):
        own = [p for p in trained if p.is_expert is is_expert]
        numel = sum(p.numel for p in own)
        padded = sum(
            sum(buckets(part, ranks, limit, spread=spread)) for part in by_chunk(own, chunks)
        )
        weights += padded * item_bytes
        gradients += padded * WIDE
        optimizer += _adam(numel / ranks if spread else numel, len(own), half)
    return State(
        weights=weights, gradients=gradients, gradient_item=0, optimizer=optimizer, main_gradients=0
    )


def keeps_own_gradients(config: RunConfig, layout: Layout, num_micro_batches: int) -> bool:
    """Whether gradients are autograd's own, as no other rank shares them and none is added up in
    less than its precision."""
    precision, options = config.train.precision, config.ddp
    alone = layout.tp * layout.cp * layout.dp == 1
    exact = precision == "fp32" or (precision == "bf16" and num_micro_batches == 1)
    return (
        alone and exact and not (options.use_distributed_optimizer or options.overlap_grad_reduce)
    )


def buckets(
    parameters: Sequence[ParameterCost], ranks: int, limit: int | None, *, spread: bool
) -> list[int]:
    """Numbers in each bucket of one of Megatron's buffers of gradients.

    Where a distributed optimizer spreads them, parameters begin at multiples of 64, buckets end at
    multiples of 128 and of the ranks, and the shared embedding is a bucket of its own.

    Args:
        ranks: That share the parameters.
        limit: From ``bucket_size``.
    """
    unit, aligned = (math.lcm(ranks, _BUCKET_UNIT), _ALIGNED) if spread else (1, 1)
    found, start, end = [], 0, 0

    def close() -> None:
        nonlocal start, end
        if end > start:
            end = _up(end, unit)
            found.append(end - start)
            start = end

    for parameter in reversed(parameters):
        alone = spread and parameter.is_shared_embedding
        if alone:
            close()
        end = _up(end, aligned) + parameter.numel
        if alone or (limit is not None and end - start >= limit):
            close()
    close()
    return found


def bucket_size(config: RunConfig, layout: Layout, pp_rank: int) -> int | None:
    """Parameters after which a bucket is full; None for one bucket. Megatron has several on the
    first pipeline stage only: no other waits for them."""
    if not config.ddp.overlap_grad_reduce or pp_rank > 0:
        return None
    return config.ddp.bucket_size or max(_DEFAULT_BUCKET, _BUCKET_OF_RANK * layout.dp)


def by_chunk(
    parameters: Sequence[ParameterCost], chunks: Sequence[Sequence[int]]
) -> list[list[ParameterCost]]:
    """Parameters of each chunk of the model, which has buffers of its own.

    Args:
        chunks: Layers of each.
    """
    places = {layer: place for place, layers in enumerate(chunks) for layer in layers}
    found: list[list[ParameterCost]] = [[] for _ in chunks]
    for parameter in parameters:
        is_end = parameter.part in _AFTER_LAYERS
        beside = len(chunks) - 1 if is_end else 0
        place = beside if parameter.layer is None else places[parameter.layer]
        found[place].append(parameter)
    return found


def _up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def _adam(numel: float, tensors: int, half: bool) -> float:
    """Two moments, a master copy under mixed precision, and a step count for each tensor."""
    return numel * WIDE * (3 if half else 2) + tensors * WIDE
