"""What every kind of rank of a run is expected to hold, send and compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ascend_run.core.config.attention_needs import needed_features
from ascend_run.core.config.expert_layers import moe_layers
from ascend_run.core.config.stages import stage_layers
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.contracts import CostChange, Messages, ParameterCost, RankKind
from ascend_run.plugin_api.errors import HookError
from ascend_run.plugin_api.layout import Layout

from . import traffic
from .backward import layer_backward, norm_backward
from .flops import (
    changed_flops,
    forward_flops,
    output_flops,
    step_attention_flops,
    step_flops,
)
from .forward import forward_working
from .kept import gather_buffer, hidden_bytes, layer_kept
from .ledger import Kept, Ledger
from .loss import kept_by_loss, loss_working
from .memory import Ends, Memory, peak_memory
from .operations import step_operations
from .parameters import rank_parameters
from .recompute import recompute_as_configured
from .schedule import in_flight
from .sizes import Sizes, sizes_of
from .state import held_state, keeps_own_gradients

_INDEX, _WIDE = 8, 4


@attrs.frozen(kw_only=True)
class RankCost:
    """What each rank of one pipeline stage expects of one step."""

    rank: RankKind
    chunks: tuple[tuple[int, ...], ...]
    parameters: int
    """Numbers that it holds."""
    trained_parameters: int
    memory: Memory
    messages: tuple[Messages, ...]
    flops: float
    """That it computes, recomputation included."""
    model_flops: float
    """That the model asks for: the numerator of MFU."""
    attention_flops: float
    """Of ``flops``: the scores and their products with the values, without recomputation."""
    operations: float
    """Of a step, about."""
    changes: Mapping[str, CostChange]
    """Plugin -> what it changes."""


def expected_costs(config: RunConfig, layout: Layout, hooks: Hooks) -> tuple[RankCost, ...]:
    """One for each pipeline rank; all ranks of a stage expect the same.

    Args:
        hooks: Of the run's plugins; only torch-free ones are asked.
    """
    sizes = sizes_of(config, layout)
    empty = {*hooks.collect("ascend_empty_layers", key=str, config=config)}
    moe = moe_layers(config)
    stages = [
        tuple(tuple(n for n in layers if n not in empty) for layers in chunks)
        for chunks in stage_layers(config)
    ]
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
    layers = tuple(n for chunk in chunks for n in chunk)
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    parameters = rank_parameters(
        config, layout, sizes, layers, moe, is_first=is_first, is_last=is_last
    )
    kept = {
        flag: layer_kept(config, layout, sizes, moe=flag) for flag in {n in moe for n in layers}
    }
    rank = RankKind(
        pp_rank=pp_rank,
        layers=layers,
        moe_layers=frozenset(moe),
        is_first=is_first,
        is_last=is_last,
        tokens=sizes.tokens,
        item_bytes=sizes.item_bytes,
        num_micro_batches=sizes.num_micro_batches,
        heads=sizes.heads,
        query_groups=sizes.query_groups,
        head_width=sizes.pair_width,
        value_width=sizes.value_width,
        attention_needs=needed_features(
            config, (plugin.manifest.attention_needs for plugin in hooks.plugins)
        ),
        has_gradient_buffers=not keeps_own_gradients(config, layout, sizes.num_micro_batches),
        kept={layer: kept[layer in moe] for layer in layers},
        parameters=parameters,
    )
    ledger = _plain(config, layout, sizes, rank, len(chunks))
    ledger.buffers["rotary tables"] = _rotary_bytes(config, sizes)
    ledger.buffers["gathered hidden states"] = gather_buffer(config, layout, sizes, moe=bool(moe))
    recompute_as_configured(config, ledger, chunks)
    changes = {}
    for plugin, change in hooks.contributions(
        "ascend_cost", config=config, layout=layout, rank=rank
    ):
        if not isinstance(change, CostChange):
            raise HookError(f"'{plugin}' answers {change!r} to ascend_cost; expected a CostChange")
        changes[plugin] = change
        ledger.apply(change)
    state = held_state(
        config,
        layout,
        ledger.parameters,
        sizes.item_bytes,
        sizes.num_micro_batches,
        pp_rank=pp_rank,
        chunks=chunks,
    )
    ledger.messages += _of_what_is_trained(config, layout, sizes, rank, ledger.parameters)
    ledger.messages += traffic.gradients(
        config, layout, sizes, ledger.parameters, pp_rank=pp_rank, chunks=chunks
    )
    by_layer = {n: forward_flops(config, sizes, parameters, n) for n in layers}
    computed, asked = changed_flops(sizes, ledger.parameters, len(parameters), ledger.repeated)
    if is_last and not trains_output(config, ledger.parameters):
        computed, asked = (flops - output_flops(sizes) for flops in (computed, asked))
    passes = sizes.num_micro_batches
    return RankCost(
        rank=rank,
        chunks=tuple(chunks),
        parameters=sum(p.numel for p in ledger.parameters),
        trained_parameters=sum(p.numel for p in ledger.parameters if p.trained),
        memory=peak_memory(
            ledger,
            chunks,
            in_flight(config, layout, pp_rank, sizes.num_micro_batches),
            state,
            _ends(config, layout, sizes, rank, ledger.parameters),
        ),
        messages=_summed(ledger.sent()),
        flops=ledger.flops + passes * computed,
        model_flops=step_flops(config, sizes, by_layer, has_output=is_last, model_only=True)
        + passes * asked,
        attention_flops=step_attention_flops(config, sizes, len(layers)),
        operations=step_operations(sizes, dense=len(layers) - len(moe), moe=len(moe)),
        changes=changes,
    )


def _plain(
    config: RunConfig, layout: Layout, sizes: Sizes, rank: RankKind, num_chunks: int
) -> Ledger:
    layers, moe = rank.layers, rank.moe_layers
    by_layer = {n: forward_flops(config, sizes, rank.parameters, n) for n in layers}
    forward = {n: traffic.layer_forward(config, layout, sizes, moe=n in moe) for n in layers}
    steps = {
        flag: layer_backward(config, layout, sizes, moe=flag) for flag in {n in moe for n in layers}
    }
    messages = [m for parts in forward.values() for group in parts.values() for m in group]
    messages += traffic.between_stages(layout, sizes, rank.pp_rank, num_chunks)
    return Ledger(
        kept={
            n: [
                Kept(
                    part=t.part,
                    name=t.name,
                    nbytes=t.nbytes,
                    # The router widens what enters it.
                    entry_bytes=hidden_bytes(sizes) if t.key == "router.input" else None,
                )
                for t in rank.kept[n]
            ]
            for n in layers
        },
        steps={n: steps[n in moe] for n in layers},
        parameters=list(rank.parameters),
        messages=messages,
        flops=step_flops(config, sizes, by_layer, has_output=rank.is_last),
        part_flops=by_layer,
        part_messages=forward,
        num_micro_batches=sizes.num_micro_batches,
        working=list(forward_working(config, layout, sizes)),
    )


def _of_what_is_trained(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    rank: RankKind,
    parameters: Sequence[ParameterCost],
) -> Iterator[Messages]:
    """Messages of the layers' backward and of both ends: some only serve a weight's gradient."""
    trained: dict[int | None, set[str]] = {layer: set() for layer in (None, *rank.layers)}
    for parameter in parameters:
        if parameter.trained:
            trained[parameter.layer].add(parameter.key)
    for layer in rank.layers:
        yield from traffic.layer_backward(
            config, layout, sizes, moe=layer in rank.moe_layers, trained=trained[layer]
        )
    yield from traffic.ends(
        config,
        layout,
        sizes,
        is_first=rank.is_first,
        is_last=rank.is_last,
        trained=trained[None],
    )


def _ends(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    rank: RankKind,
    parameters: Sequence[ParameterCost],
) -> Ends:
    hidden, pipelined = hidden_bytes(sizes), layout.pp > 1
    is_last, tied = rank.is_last, bool(config.model.share_embeddings_and_output_weights)
    ends_trained = _trained_ends(parameters)
    trains = trains_output(config, parameters)
    table = sizes.vocab * sizes.hidden * sizes.item_bytes
    return Ends(
        hidden=hidden,
        final_norm=hidden + sizes.shared_tokens * _WIDE if is_last else 0.0,
        final_norm_backward=norm_backward(config, sizes) if is_last else 0.0,
        loss=loss_working(config, layout, sizes, trains=trains) if is_last else 0.0,
        loss_kept=sum(kept_by_loss(config, sizes, trains=trains)) if is_last else 0.0,
        output_gradient=table if trains and is_last and tied and not pipelined else 0.0,
        embedding_gradient=table if rank.is_first and "embedding" in ends_trained else 0.0,
        batch=sizes.tokens * (3 * _INDEX + _WIDE),
        has_next=not is_last,
        pipelined=pipelined,
    )


def trains_output(config: RunConfig, parameters: Sequence[ParameterCost]) -> bool:
    """Whether the output layer's weight is trained; it may be the embedding's."""
    tied = bool(config.model.share_embeddings_and_output_weights)
    # A stage after the first holds a copy of its own of a tied table.
    return bool(_trained_ends(parameters) & {"output_layer", *(["embedding"] if tied else [])})


def _trained_ends(parameters: Sequence[ParameterCost]) -> set[str]:
    return {p.part for p in parameters if p.layer is None and p.trained}


def _rotary_bytes(config: RunConfig, sizes: Sizes) -> float:
    """Cosines and sines for the positions of this rank."""
    if config.model.position_embedding_type != "rope":
        return 0.0
    return 2 * sizes.tokens / sizes.micro_batch * sizes.rotated_width * sizes.item_bytes


def _summed(messages: Sequence[Messages]) -> tuple[Messages, ...]:
    """Those of one operation, group and reason as one."""
    found: dict[Any, Messages] = {}
    for message in messages:
        key = message.operation, message.group, message.why, message.hidden
        known = found.get(key)
        found[key] = (
            message
            if known is None
            else attrs.evolve(
                known,
                calls=known.calls + message.calls,
                sent_bytes=known.sent_bytes + message.sent_bytes,
            )
        )
    return tuple(found.values())
