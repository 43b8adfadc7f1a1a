"""Builds the attention kernel of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import distributed as dist

from ascend_run.types.attention import (
    AttentionKernel,
    SequencePartition,
    UnevenPartition,
)

from .gather import GatherRoute
from .head_all_to_all import HeadAllToAll, Lengths
from .kv_routing import AllGatherKv, AllToAllKv
from .masked import MaskedRoute
from .plan import ContextParallelPlan
from .ring import RingRoute
from .shared_attention import SharedAttention

Groups: TypeAlias = Mapping[str, dist.ProcessGroup]


def context_parallel_kernel(
    plan: ContextParallelPlan, inner: AttentionKernel, groups: Groups, layer_index: int
) -> AttentionKernel:
    """Wrap ``inner`` for this rank's part of the sequence and the heads.

    Args:
        inner: See ``inner.missing_features``, unless the plan only splits heads.
        groups: Those of ``plan.group_names``, by name.
        layer_index: Of the full model, from 0.
    """
    kv_cache = plan.kv_cache.kv_cache_of(layer_index)
    if plan.keys == "heads":
        group = groups[plan.head_group]
        return HeadAllToAll(
            inner,
            group,
            keys=AllGatherKv() if plan.gathers_heads else AllToAllKv(),
            kv_cache=kv_cache,
            lengths=_lengths(plan.partition, group),
        )
    kernel = _shared_attention(plan, inner, groups, layer_index)
    if plan.head_degree is None:
        return kernel
    return HeadAllToAll(kernel, groups[plan.head_group])


def _shared_attention(
    plan: ContextParallelPlan, inner: AttentionKernel, groups: Groups, layer_index: int
) -> AttentionKernel:
    partition, kv_cache = plan.partition, plan.kv_cache.kv_cache_of(layer_index)
    group, *others = (groups[name] for name in plan.key_groups)
    if plan.keys == "ring":
        windows = others[0] if others else None
        return SharedAttention(
            inner, RingRoute(group, partition, windows=windows, kv_cache=kv_cache)
        )
    if plan.keys == "gather":
        at_once = plan.groups_at_once
        route = GatherRoute(group, partition, groups_at_once=at_once, kv_cache=kv_cache)
        return SharedAttention(inner, route)
    return SharedAttention(inner, MaskedRoute(group, partition))


def _lengths(partition: SequencePartition, group: dist.ProcessGroup) -> Lengths | None:
    """Return a function to every rank's length, or None if all are equal."""
    if not isinstance(partition, UnevenPartition):
        return None

    def of_ranks(held: int) -> list[int]:
        whole = partition.full_length(held, group.rank(), group.size())
        chunks = (partition.chunks(whole, rank, group.size()) for rank in range(group.size()))
        return [sum(stop - start for start, stop in of_rank) for of_rank in chunks]

    return of_ranks
