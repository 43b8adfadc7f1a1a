"""Rows of a Megatron linear that belong to each of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ParallelLinear: TypeAlias = ColumnParallelLinear | RowParallelLinear


def tensor_group(linear: ParallelLinear) -> dist.ProcessGroup:
    """Return the tensor-parallel group of the linear."""
    assert linear.tp_group is not None
    return linear.tp_group


def shares_groups(linear: ParallelLinear, name: str) -> bool:
    """Return whether several ranks share a key-value group, so that a rank's rows of the QKV
    projection are a part of one, in which queries, keys and values have unequal shares."""
    groups = cast("TransformerConfig", linear.config).num_query_groups
    assert groups is not None  # Megatron fills it in
    return name.endswith("linear_qkv") and groups < tensor_group(linear).size()


def is_local(linear: ParallelLinear, name: str) -> bool:
    """Return whether the token dispatcher has the collectives of a linear of shared experts."""
    overlaps = cast("TransformerConfig", linear.config).moe_shared_expert_overlap
    return bool(overlaps) and name.startswith("mlp.shared_experts.")


def rows_of_parts(linear: ParallelLinear, name: str) -> dict[str, tuple[int, int]]:
    """Return (groups, rows per group) of every part of a linear, in Megatron's order of the output.

    The rows of queries, keys and values are interleaved by key-value group; those of other linears
    are one block per part.
    """
    config, rows = cast("TransformerConfig", linear.config), linear.weight.shape[0]
    if name.endswith("linear_qkv"):
        assert config.num_query_groups is not None  # Megatron fills both in
        assert config.kv_channels is not None
        groups, width = config.num_query_groups, config.kv_channels
        if not shares_groups(linear, name):
            groups //= tensor_group(linear).size()
        queries = config.num_attention_heads // config.num_query_groups
        return {
            "linear_q": (groups, queries * width),
            "linear_k": (groups, width),
            "linear_v": (groups, width),
        }
    block, _, short = name.rpartition(".")
    if block == "mlp.shared_experts":
        short = short.replace("linear", "shared_experts")
    if short.endswith("fc1") and config.gated_linear_unit:
        return {f"{short}_gate": (1, rows // 2), f"{short}_up": (1, rows // 2)}
    return {short: (1, rows)}
