"""Memory of weights, gradients and optimizer state, which persist between steps.

Follows ``train.data_parallel`` and ``train.optimizer``: gradients in float32 buffers of Megatron's
DistributedDataParallel, or autograd's ``grad`` on a single rank; the states that the optimizer
declares, and float32 master weights under mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from ascend_run.plugin_api.contracts import OptimizerSpec, OptimizerState, ParameterCost
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

WIDE = 4
"""Bytes of float32: master weights, buffers of gradients."""
_ALIGNED = 64
_BUCKET_UNIT = 128
_DEFAULT_BUCKET = 40_000_000
_BUCKET_OF_RANK = 1_000_000
_AFTER_LAYERS = ("final_norm", "output_layer")
_IN_MLP = ("experts", "router", "shared_experts")


@attrs.frozen(kw_only=True)
class State:
    """Bytes on one rank."""

    weights: float
    gradients: float
    """Gradient buffers, allocated for the whole run; 0 if gradients are autograd's ``grad``."""
    gradient_item: int
    """Size of a gradient element that is not in a buffer; 0 if there are buffers. Unit: bytes."""
    optimizer: float
    """Of the whole run on the device."""
    off_device: float
    """Optimizer states that are on the device only in their part of the optimizer step."""
    on_device_at_once: float
    """What is there of those at once."""
    main_gradients: float = 0.0
    """Float32 copies of gradients during the optimizer step."""
    copied_gradients: float = 0.0
    """The most that gradients and these copies take together."""


def held_state(
    config: RunConfig,
    layout: Layout,
    parameters: Sequence[ParameterCost],
    item_bytes: int,
    num_microbatches: int,
    spec: OptimizerSpec,
    *,
    main_param_bytes: float = WIDE,
    optimizer_bytes: float | None = None,
    optimizer_elements: float | None = None,
    pp_rank: int,
    chunks: Sequence[Sequence[int]],
) -> State:
    """Return the memory of the state on the ranks of one stage.

    Args:
        spec: The run's optimizer.
        main_param_bytes: Size of an element of the master weights, where there are any.
        optimizer_bytes: See ``Ledger``.
        optimizer_elements: Elements whose states are on the device at once; None: all, always.
        chunks: Layers of each chunk of its model.
    """
    trained = [p for p in parameters if p.trained]
    fixed = sum(
        p.numel * item_bytes if p.nbytes is None else p.nbytes for p in parameters if not p.trained
    )
    half = config.train.precision != "fp32"
    main = main_param_bytes if half else 0
    spread = config.ddp.use_distributed_optimizer
    kinds = [(trained, 1)]
    alone = keeps_own_gradients(config, layout, num_microbatches)
    if not alone:
        by_kind = ((False, layout.dp * layout.cp), (True, layout.expt_dp))
        kinds = [([p for p in trained if p.is_expert is is_e], n) for is_e, n in by_kind]
    shares = [(own, ranks if spread else 1) for own, ranks in kinds]
    of_optimizer = _of_optimizer(spec, shares, main, optimizer_bytes, optimizer_elements)
    if alone:
        numel = sum(p.numel for p in trained)
        return State(
            weights=numel * item_bytes + fixed,
            gradients=0,
            gradient_item=item_bytes,
            main_gradients=numel * WIDE if half else 0,
            copied_gradients=_while_copied(trained, item_bytes) if half else 0,
            **of_optimizer,
        )
    weights, gradients = fixed, 0.0
    limit = bucket_size(config, layout, pp_rank)
    for own, ranks in kinds:
        padded = sum(
            sum(buckets(part, ranks, limit, spread=spread))
            for part in by_chunk(own, chunks, is_first=pp_rank == 0)
        )
        weights += padded * item_bytes
        gradients += padded * WIDE
    return State(weights=weights, gradients=gradients, gradient_item=0, **of_optimizer)


def _while_copied(parameters: Sequence[ParameterCost], item_bytes: int) -> float:
    """Return the most bytes of gradients while they are copied to float32: one after the other,
    each of which is then freed."""
    found = held = item_bytes * sum(p.numel for p in parameters)
    for parameter in sorted(parameters, key=_decays, reverse=True):  # in groups of the optimizer
        held += parameter.numel * WIDE
        found = max(found, held)
        held -= parameter.numel * item_bytes
    return found


def _of_optimizer(
    spec: OptimizerSpec,
    kinds: Sequence[tuple[Sequence[ParameterCost], int]],
    main: float,
    most: float | None,
    elements: float | None,
) -> dict[str, float]:
    """Return the fields of ``State`` about states and master weights.

    Args:
        kinds: Parameters, and the number of ranks that share the elements of each.
        most: ``optimizer_bytes``; elements: ``optimizer_elements``. See ``held_state``.
    """
    states = sum(optimizer_bytes(spec, own, ranks, main) for own, ranks in kinds)
    if elements is None:
        return {"optimizer": states, "off_device": 0.0, "on_device_at_once": 0.0}
    if most is None:
        away = sum(optimizer_bytes(spec, own, ranks, main, scalars=False) for own, ranks in kinds)
    else:
        away = sum(_that_fit(spec, kinds, most))
    numel = sum(p.numel / ranks for own, ranks in kinds for p in own)
    at_once = away * min(1.0, elements / max(numel, 1.0))
    return {"optimizer": states - away, "off_device": away, "on_device_at_once": at_once}


def _that_fit(
    spec: OptimizerSpec, kinds: Sequence[tuple[Sequence[ParameterCost], int]], most: float
) -> Iterator[float]:
    """Yield the bytes of states that fit in so many, in the order in which parameters are updated;
    not those of one value."""
    for own, ranks in kinds:
        for parameter in sorted(own, key=_decays, reverse=True):
            for state in _states_of(spec, parameter):
                nbytes = state.nbytes(parameter.numel / ranks, 0)
                if nbytes <= most:
                    most -= nbytes
                    yield nbytes


def keeps_own_gradients(config: RunConfig, layout: Layout, num_microbatches: int) -> bool:
    """Whether gradients are autograd's ``grad`` rather than in buffers: on a single rank, if they
    need no accumulation in higher precision."""
    precision, options = config.train.precision, config.ddp
    alone = layout.tp * layout.cp * layout.dp == 1
    exact = precision == "fp32" or (precision == "bf16" and num_microbatches == 1)
    return (
        alone and exact and not (options.use_distributed_optimizer or options.overlap_grad_reduce)
    )


def buckets(
    parameters: Sequence[ParameterCost], ranks: int, limit: int | None, *, spread: bool
) -> list[int]:
    """Return the number of elements of each bucket of a Megatron gradient buffer.

    With a distributed optimizer, parameters start at multiples of 64, buckets end at multiples of
    128 and of the number of ranks, and the shared embedding has its own bucket.

    Args:
        ranks: Number of data-parallel ranks.
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
    """Return the bucket size in parameters; None for a single bucket. Megatron has several buckets
    on the first pipeline stage only, where the reduction is not overlapped otherwise."""
    if not config.ddp.overlap_grad_reduce or pp_rank > 0:
        return None
    return config.ddp.bucket_size or max(_DEFAULT_BUCKET, _BUCKET_OF_RANK * layout.dp)


def by_chunk(
    parameters: Sequence[ParameterCost], chunks: Sequence[Sequence[int]], *, is_first: bool
) -> list[list[ParameterCost]]:
    """Return the parameters of each model chunk, since each has its own buffers.

    Args:
        chunks: Layers of each chunk.
        is_first: Whether this is the first stage; another one embeds in its last chunk.
    """
    places = {layer: place for place, layers in enumerate(chunks) for layer in layers}
    found: list[list[ParameterCost]] = [[] for _ in chunks]
    for parameter in parameters:
        is_end = parameter.part in _AFTER_LAYERS or not is_first
        beside = len(chunks) - 1 if is_end else 0
        place = beside if parameter.layer is None else places[parameter.layer]
        found[place].append(parameter)
    return found


def _up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def optimizer_bytes(
    spec: OptimizerSpec,
    parameters: Sequence[ParameterCost],
    ranks: int,
    main: float,
    *,
    scalars: bool = True,
) -> float:
    """Return the size of the declared states and the master weights.

    Args:
        ranks: Number of ranks that share the elements of each parameter.
        main: Size of an element of the master weights; 0 if there are none.
        scalars: Whether to count states of one value.
    """
    found = 0.0
    for parameter in parameters:
        numel = parameter.numel / ranks
        found += sum(state.nbytes(numel, int(scalars)) for state in _states_of(spec, parameter))
        found += numel * main
    return found


def _states_of(spec: OptimizerSpec, parameter: ParameterCost) -> list[OptimizerState]:
    """Return the states of one parameter."""
    # The model calls the cost's parts of a layer with experts by their place in it.
    owner = f"mlp.{parameter.part}" if parameter.part in _IN_MLP else parameter.part
    options = spec.parameter_options(f"{owner}.{parameter.name}", _decays(parameter))
    return [state for state in spec.states.values() if state.exists_for(options)]


def _decays(parameter: ParameterCost) -> bool:
    """Return whether the optimizer takes a parameter for a matrix, which has weight decay."""
    # The cost counts embedding tables as none, since they are used in no matmul.
    return parameter.is_matrix or parameter.name.endswith("_embeddings")
