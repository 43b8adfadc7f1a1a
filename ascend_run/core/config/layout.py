"""The layout that a config asks for, and whether heads, experts, sequence and ranks divide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.layout import Layout
from ascend_run.plugin_api.working_values import around, divisors, one_of

from .consistency import consistency_problems
from .stages import stage_problems, virtual_size


def layout_of(config: RunConfig, world_size: int, rank: int = 0) -> Layout:
    """The sizes of every axis; whether they divide is for ``layout_problems`` to say."""
    parallel = config.parallel
    return Layout(
        world_size=world_size,
        rank=rank,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        expt_tp=parallel.expert_tensor_parallel_size or 1,
        vpp=parallel.virtual_pipeline_model_parallel_size,
    )


def run_problems(
    config: RunConfig, layout: Layout, *, sequence_multiple: int | None = None
) -> list[str]:
    """Everything in a config that does not fit together, for one refusal.

    Args:
        sequence_multiple: ``multiple`` of the SequencePartition; None where no plugin owns the
            sequence exchange.
    """
    return [
        *consistency_problems(config),
        *layout_problems(config, layout, sequence_multiple=sequence_multiple),
    ]


def layout_problems(
    config: RunConfig, layout: Layout, *, sequence_multiple: int | None = None
) -> list[str]:
    """A sentence for each thing that does not divide, with the values that would work."""
    return [
        *_world(layout),
        *_tensor_parallel(config, layout),
        *_experts(config, layout),
        *_sequence(config, layout, sequence_multiple),
        *_layers(config, layout),
        *_batch(config, layout),
    ]


def _world(layout: Layout) -> Iterator[str]:
    grids = {
        "tensor * context * pipeline": layout.tp * layout.cp * layout.pp,
        "expert tensor * expert * pipeline": layout.expt_tp * layout.ep * layout.pp,
    }
    wrong = [f"{axes} = {size}" for axes, size in grids.items() if layout.world_size % size]
    if wrong:
        unit = math.lcm(*grids.values())
        yield (
            f"{layout.world_size} ranks are not a multiple of the parallel sizes "
            f"{' and '.join(wrong)}; use --nproc {around(layout.world_size, unit)}"
        )


def _tensor_parallel(config: RunConfig, layout: Layout) -> Iterator[str]:
    model, tp = config.model, layout.tp
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "ffn_hidden_size": model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }
    for name, size in sizes.items():
        if size is not None and size % tp:
            yield (
                f"model.{name}={size} cannot be split over "
                f"parallel.tensor_model_parallel_size={tp}; use {one_of(divisors(size))}"
            )
    if config.parallel.sequence_parallel and tp == 1:
        yield (
            "parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size above 1; "
            "leave it out"
        )
    if model.num_moe_experts is not None and tp > 1 and not config.parallel.sequence_parallel:
        yield (
            f"experts with parallel.tensor_model_parallel_size={tp} need "
            "parallel.sequence_parallel=true"
        )


def _experts(config: RunConfig, layout: Layout) -> Iterator[str]:
    experts, ep = config.model.num_moe_experts, layout.ep
    if experts is None and ep > 1:
        yield (
            f"parallel.expert_model_parallel_size={ep} needs experts; set model.num_moe_experts, "
            "or use 1"
        )
    elif experts is not None and experts % ep:
        yield (
            f"model.num_moe_experts={experts} cannot be split over "
            f"parallel.expert_model_parallel_size={ep}; use {one_of(divisors(experts))}"
        )


def _sequence(config: RunConfig, layout: Layout, multiple: int | None) -> Iterator[str]:
    if layout.cp > 1 and multiple is None:
        yield (
            f"parallel.context_parallel_size={layout.cp} needs a plugin that exchanges the "
            "sequence between ranks; add one, such as --enable ulysses, or use 1"
        )
    shares = {"parallel.context_parallel_size": layout.cp}
    if layout.cp > 1 and multiple is not None and multiple > 1:
        shares["the cut's multiple"] = multiple
    if config.parallel.sequence_parallel and layout.tp > 1:
        shares["parallel.tensor_model_parallel_size"] = layout.tp
    unit = math.prod(shares.values())
    if config.data.seq_length % unit:
        product = " * ".join(f"{name}={size}" for name, size in shares.items() if size > 1)
        yield (
            f"data.seq_length={config.data.seq_length} cannot be split over {product}; use "
            f"{around(config.data.seq_length, unit)}"
        )


def _layers(config: RunConfig, layout: Layout) -> Iterator[str]:
    stages = layout.pp * (layout.vpp or 1)
    if config.model.num_layers % stages:
        yield (
            f"model.num_layers={config.model.num_layers} cannot be split over {stages} pipeline "
            f"stages; use {one_of(divisors(config.model.num_layers))}"
        )


def _batch(config: RunConfig, layout: Layout) -> Iterator[str]:
    if layout.dp < 1:
        return
    unit = config.train.micro_batch_size * layout.dp
    if config.train.global_batch_size % unit:
        yield (
            f"train.global_batch_size={config.train.global_batch_size} is not a multiple of "
            f"train.micro_batch_size={config.train.micro_batch_size} times {layout.dp} "
            f"data-parallel ranks; use {around(config.train.global_batch_size, unit)}"
        )
