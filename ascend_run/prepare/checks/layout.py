"""Check that heads, experts, sequence, batch and ranks are divisible by the parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from ascend_run.plugin_api.error_text import around, cannot_split, divisors, one_of
from ascend_run.types.config import RunConfig
from ascend_run.types.declarations import Claim
from ascend_run.types.layout import Layout

from .consistency import consistency_problems
from .stages import stage_problems


def run_problems(
    config: RunConfig,
    layout: Layout,
    *,
    claimed: Collection[Claim] = (),
    sequence_multiple: int | None = None,
) -> list[str]:
    """Return all inconsistencies of a config.

    Args:
        claimed: Seams that plugins of the run own.
        sequence_multiple: ``multiple`` of the SequencePartition, 0 for uneven sharding; None if no
            plugin provides context parallelism.
    """
    return [
        *consistency_problems(config, claimed),
        *layout_problems(config, layout, sequence_multiple=sequence_multiple),
    ]


def layout_problems(
    config: RunConfig, layout: Layout, *, sequence_multiple: int | None = None
) -> list[str]:
    """Return a message for each size that is not divisible, with values that would work."""
    return [
        *_world(layout),
        *_tensor_parallel(config, layout),
        *_experts(config, layout),
        *_sequence(config, layout, sequence_multiple),
        *stage_problems(config),
        *_overlapped_stages(config, layout),
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
            f"{' and '.join(wrong)}; use {around(layout.world_size, unit)} in all (--nproc counts "
            "those of one node; plan also takes --world, which counts all)"
        )


def _tensor_parallel(config: RunConfig, layout: Layout) -> Iterator[str]:
    model, tp = config.model, layout.tp
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }
    if model.multi_latent_attention:
        sizes["q_lora_rank"] = model.q_lora_rank
        both = model.kv_lora_rank + model.qk_pos_emb_head_dim  # rows of one matrix
        sizes["kv_lora_rank plus model.qk_pos_emb_head_dim"] = both
    for name, size in sizes.items():
        if size is not None and size % tp:
            yield cannot_split(f"model.{name}", size, "parallel.tensor_model_parallel_size", tp)
    groups = model.num_query_groups
    if groups is not None and tp not in (fits := _shares(config, groups)):
        yield (
            f"model.num_query_groups={groups} cannot be split over, or shared evenly by, "
            f"parallel.tensor_model_parallel_size={tp}; use {one_of(fits)}"
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


def _shares(config: RunConfig, groups: int) -> list[int]:
    """Return the tensor-parallel sizes that split the key-value groups, or whose ranks share each.

    Shared ones leave each rank a part of the rows of keys and values, which must be equal.
    """
    heads = config.model.num_attention_heads
    rows = 2 * groups * (config.model.kv_channels or config.model.hidden_size // heads)
    return [n for n in divisors(heads) if not (groups % n and (n % groups or rows % n))]


def _experts(config: RunConfig, layout: Layout) -> Iterator[str]:
    experts = config.model.num_moe_experts
    sizes = {"parallel.expert_model_parallel_size": layout.ep}
    sizes["parallel.expert_tensor_parallel_size"] = layout.expt_tp
    if experts is None:
        for name, size in sizes.items():
            if size > 1:
                yield f"{name}={size} needs experts; set model.num_moe_experts, or use 1"
        return
    names = ("moe_ffn_hidden_size", "ffn_hidden_size")
    used = next((name for name in names if config.model[name] is not None), None)
    for own, (over, size) in zip(("num_moe_experts", used), sizes.items(), strict=True):
        if own is not None and config.model[own] % size:
            yield cannot_split(f"model.{own}", config.model[own], over, size)


def _sequence(config: RunConfig, layout: Layout, multiple: int | None) -> Iterator[str]:
    if layout.cp > 1 and multiple is None:
        yield (
            f"parallel.context_parallel_size={layout.cp} needs a plugin that exchanges the "
            f"sequence between ranks; add one that claims '{Claim.CONTEXT_PARALLEL}' (ascend-run "
            "plugins --json shows the claims), or use 1"
        )
    shares = {} if multiple == 0 else {"parallel.context_parallel_size": layout.cp}
    if layout.cp > 1 and multiple is not None and multiple > 1:
        shares["the sequence partition's multiple"] = multiple
    if config.parallel.sequence_parallel and layout.tp > 1:
        shares["parallel.tensor_model_parallel_size"] = layout.tp
    unit = math.prod(shares.values())
    if config.data.seq_length % unit:
        product = " * ".join(f"{name}={size}" for name, size in shares.items() if size > 1)
        yield (
            f"data.seq_length={config.data.seq_length} cannot be split over {product}; use "
            f"{around(config.data.seq_length, unit)}"
        )


def _overlapped_stages(config: RunConfig, layout: Layout) -> Iterator[str]:
    if not config.parallel.overlap_p2p_comm:
        return
    if layout.vpp is None:
        yield (
            "parallel.overlap_p2p_comm=true needs parallel.virtual_pipeline_model_parallel_size; "
            "leave it out"
        )
    elif config.parallel.batch_p2p_comm:
        yield "parallel.overlap_p2p_comm=true needs parallel.batch_p2p_comm=false"


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
    elif layout.vpp is not None and layout.pp > 1:
        yield from _interleaved(config, layout, unit)


def _interleaved(config: RunConfig, layout: Layout, unit: int) -> Iterator[str]:
    """Check the number of micro-batches for Megatron's interleaved schedule.

    Args:
        unit: Sequences in one micro-batch over all data-parallel ranks.
    """
    name = "parallel.microbatch_group_size_per_vp_stage"
    chosen = config.parallel.microbatch_group_size_per_vp_stage
    group, count = chosen or layout.pp, config.train.global_batch_size // unit
    if group < layout.pp:
        yield (
            f"{name}={group} must be at least parallel.pipeline_model_parallel_size={layout.pp}; "
            "leave it out, or use that"
        )
    elif count < group or 0 < count % group < layout.pp:
        named = f"{name}={group}" if chosen else "parallel.pipeline_model_parallel_size"
        yield (
            f"train.global_batch_size={config.train.global_batch_size} makes {count} micro-batches "
            f"on each rank, but a virtual pipeline takes them in groups of {named}"
            f"{'' if chosen else f'={layout.pp}'}; use "
            f"{around(config.train.global_batch_size, group * unit)}"
        )
