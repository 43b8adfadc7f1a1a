"""Estimated memory, communication and FLOPs of the ranks of each pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.config.attention_needs import needed_features
from ascend_run.core.config.optimizer import optimizer_spec
from ascend_run.core.config.stages import stage_layers
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.contracts import (
    Communication,
    CostChange,
    ParameterCost,
    PipelineStage,
    Storage,
)
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from . import mtp_traffic, traffic
from .backward import layer_backward
from .collectives import merged
from .ends import stage_ends
from .flops import changed_flops, forward_flops, output_flops, step_attention_flops, step_flops
from .forward import forward_working
from .ledger import Ledger, Offload, Saved
from .memory import Memory, peak_memory
from .operations import step_operations
from .parameters import rank_parameters, trains_output
from .recompute import recompute_as_configured, treat_as_plugins_do
from .saved import (
    gather_buffer,
    layer_saved,
    mtp_saved,
    rotary_bytes,
)
from .schedule import in_flight
from .sizes import Sizes, sizes_of
from .state import held_state, keeps_own_gradients

_INDEX, _WIDE = 8, 4


@attrs.frozen(kw_only=True)
class RankCost:
    """The estimate for each rank of one pipeline stage, for one step."""

    rank: PipelineStage
    chunks: tuple[tuple[int, ...], ...]
    parameters: int
    """Number of parameters."""
    trained_parameters: int
    memory: Memory
    communication: tuple[Communication, ...]
    flops: float
    """Hardware FLOPs, including recomputation."""
    model_flops: float
    """Model FLOPs: the numerator of MFU."""
    attention_flops: float
    """Part of ``flops`` in the attention kernel, without recomputation."""
    operations: float
    """Approximate number of operations."""
    offloaded: Mapping[Storage, Offload]
    """Saved activations that leave the device: in host memory, and in files."""
    changes: Mapping[str, CostChange]
    """Plugin -> its change."""


def expected_costs(config: RunConfig, layout: Layout, hooks: Hooks) -> tuple[RankCost, ...]:
    """Estimate the cost of each pipeline stage, whose ranks all have the same.

    Args:
        hooks: Hooks of the run's plugins; only torch-free ones are called.
    """
    sizes = sizes_of(config, layout)
    empty = {*hooks.collect("ascend_empty_layers", key=str, config=config)}
    moe = moe_layers(config.model)
    *others, (*chunks, last) = [
        tuple(tuple(n for n in layers if n not in empty) for layers in chunks)
        for chunks in stage_layers(config)
    ]
    # Layers of multi-token prediction are like the model's last one, and behind it.
    if max({*range(config.model.num_layers)} - empty) in moe:
        moe |= {*sizes.mtp_layers}
    stages = [*others, (*chunks, (*last, *sizes.mtp_layers))]
    return tuple(
        _rank_cost(config, layout, hooks, sizes, pp_rank, chunks, moe & {*sum(chunks, ())})
        for pp_rank, chunks in enumerate(stages)
    )


def _rank_cost(
    config: RunConfig,
    layout: Layout,
    hooks: Hooks,
    sizes: Sizes,
    pp_rank: int,
    chunks: Sequence[tuple[int, ...]],
    moe: Collection[int],
) -> RankCost:
    rank = _rank_kind(config, layout, hooks, sizes, pp_rank, chunks, moe)
    layers, parameters, is_last = rank.layers, rank.parameters, rank.is_last
    ledger = _plain(config, layout, sizes, rank, len(chunks))
    ledger.buffers["rotary tables"] = rotary_bytes(config, sizes)
    ledger.buffers["gathered hidden states"] = gather_buffer(config, layout, sizes, moe=bool(moe))
    recompute_as_configured(config, ledger, chunks)
    treat_as_plugins_do(ledger, activation_policies(config, hooks))
    changes = _apply_plugins(config, layout, hooks, rank, ledger, chunks)
    waiting = in_flight(config, layout, pp_rank, sizes.num_microbatches)
    state = held_state(
        config,
        layout,
        ledger.parameters,
        sizes.item_bytes,
        sizes.num_microbatches,
        optimizer_spec(config, hooks),
        main_param_bytes=ledger.main_param_bytes,
        optimizer_bytes=ledger.optimizer_bytes,
        optimizer_elements=ledger.elements_at_once,
        pp_rank=pp_rank,
        chunks=chunks,
    )
    ledger.communication += _of_what_is_trained(config, layout, sizes, rank, ledger.parameters)
    ledger.communication += traffic.gradients(
        config, layout, sizes, ledger.parameters, pp_rank=pp_rank, chunks=chunks
    )
    by_layer = {n: forward_flops(config, sizes, parameters, n) for n in layers}
    hardware, model = changed_flops(sizes, ledger.parameters, len(parameters), ledger.repeated)
    if is_last and not trains_output(config, ledger.parameters):
        hardware, model = (flops - output_flops(sizes) for flops in (hardware, model))
    return RankCost(
        rank=rank,
        chunks=tuple(chunks),
        parameters=sum(p.numel for p in ledger.parameters),
        trained_parameters=sum(p.numel for p in ledger.parameters if p.trained),
        memory=peak_memory(
            ledger,
            chunks,
            waiting,
            state,
            stage_ends(config, layout, sizes, rank, ledger.parameters),
        ),
        communication=merged(ledger.sent()),
        flops=ledger.flops + sizes.num_microbatches * hardware,
        model_flops=step_flops(config, sizes, by_layer, has_output=is_last, model_only=True)
        + sizes.num_microbatches * model,
        attention_flops=step_attention_flops(config, sizes, layers),
        operations=step_operations(sizes, dense=len(layers) - len(moe), moe=len(moe)),
        offloaded=ledger.offloads(waiting),
        changes=changes,
    )


def _rank_kind(
    config: RunConfig,
    layout: Layout,
    hooks: Hooks,
    sizes: Sizes,
    pp_rank: int,
    chunks: Sequence[tuple[int, ...]],
    moe: Collection[int],
) -> PipelineStage:
    """The ranks of one stage, with the plain model's estimate."""
    layers = tuple(n for chunk in chunks for n in chunk)
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    saved = {
        flag: layer_saved(config, layout, sizes, moe=flag) for flag in {n in moe for n in layers}
    }
    before = mtp_saved(config, sizes)
    parameters = rank_parameters(
        config, layout, sizes, layers, moe, is_first=is_first, is_last=is_last
    )
    by_layer = {n: forward_flops(config, sizes, parameters, n) for n in layers}
    return PipelineStage(
        pp_rank=pp_rank,
        layers=layers,
        moe_layers=frozenset(moe),
        is_first=is_first,
        is_last=is_last,
        tokens=sizes.tokens,
        item_bytes=sizes.item_bytes,
        num_microbatches=sizes.num_microbatches,
        heads=sizes.heads,
        query_groups=sizes.query_groups,
        head_width=sizes.pair_width,
        value_width=sizes.value_width,
        attention_needs=needed_features(
            config, (plugin.manifest.attention_needs for plugin in hooks.plugins)
        ),
        has_gradient_buffers=not keeps_own_gradients(config, layout, sizes.num_microbatches),
        saved={
            layer: (*(before if layer in sizes.mtp_layers else ()), *saved[layer in moe])
            for layer in layers
        },
        parameters=parameters,
        forward_flops=step_flops(config, sizes, by_layer, has_output=is_last, forward_only=True),
    )


def _apply_plugins(
    config: RunConfig,
    layout: Layout,
    hooks: Hooks,
    rank: PipelineStage,
    ledger: Ledger,
    chunks: Sequence[Sequence[int]],
) -> dict[str, CostChange]:
    """Apply the plugins' changes to the ledger in resolved order; return plugin -> change.

    Raises:
        HookError: A plugin returns anything but a CostChange.
    """
    changes = {}
    for plugin, change in hooks.contributions(
        "ascend_cost", config=config, layout=layout, rank=rank
    ):
        with hooks.naming("ascend_cost", plugin):
            if not isinstance(change, CostChange):
                raise HookError(
                    f"'{plugin}' returned {change!r} from ascend_cost; expected a CostChange"
                )
            changes[plugin] = change
    for change in changes.values():
        if change.recomputed_ahead is not None:
            ledger.recompute_ahead(change.recomputed_ahead, chunks)
    for plugin, change in changes.items():
        with hooks.naming("ascend_cost", plugin):
            ledger.apply(change)
    return changes


def _plain(
    config: RunConfig, layout: Layout, sizes: Sizes, rank: PipelineStage, num_chunks: int
) -> Ledger:
    layers, moe = rank.layers, rank.moe_layers
    by_layer = {n: forward_flops(config, sizes, rank.parameters, n) for n in layers}
    forward = {n: traffic.layer_forward(config, layout, sizes, moe=n in moe) for n in layers}
    for n in {*layers} & {*sizes.mtp_layers}:
        forward[n]["mtp"] = list(mtp_traffic.mtp_forward(config, layout, sizes))
    steps = {
        flag: layer_backward(config, layout, sizes, moe=flag) for flag in {n in moe for n in layers}
    }
    communication = [m for parts in forward.values() for group in parts.values() for m in group]
    communication += traffic.between_stages(layout, sizes, rank.pp_rank, num_chunks)
    return Ledger(
        saved={
            n: [Saved(part=t.part, name=t.name, nbytes=t.nbytes) for t in rank.saved[n]]
            for n in layers
        },
        steps={n: steps[n in moe] for n in layers},
        parameters=list(rank.parameters),
        communication=communication,
        flops=step_flops(config, sizes, by_layer, has_output=rank.is_last),
        part_flops=by_layer,
        part_communication=forward,
        num_microbatches=sizes.num_microbatches,
        working=list(forward_working(config, layout, sizes)),
    )


def _of_what_is_trained(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    rank: PipelineStage,
    parameters: Sequence[ParameterCost],
) -> Iterator[Communication]:
    """Communication of the layers' backward, the embedding and the loss; some of it is only needed
    for weight gradients."""
    trained: dict[int | None, set[str]] = {layer: set() for layer in (None, *rank.layers)}
    for parameter in parameters:
        if parameter.trained:
            trained[parameter.layer].add(parameter.key)
    for layer in rank.layers:
        yield from traffic.layer_backward(
            config, layout, sizes, moe=layer in rank.moe_layers, trained=trained[layer]
        )
        if layer in sizes.mtp_layers:
            yield from mtp_traffic.mtp_backward(config, layout, sizes, trained=trained[layer])
    if rank.is_last:
        yield from mtp_traffic.mtp_batch(layout, sizes)
    losses = 1 + len(sizes.mtp_layers)
    lookups = int(rank.is_first) + (losses - 1 if rank.is_last else 0)
    yield from traffic.ends(
        config,
        layout,
        sizes,
        lookups=lookups,
        losses=losses if rank.is_last else 0,
        trained=trained[None],
    )
