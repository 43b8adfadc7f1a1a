"""Fewer key-value groups than tensor-parallel ranks, so that several ranks share one.

Source: megatron/core/transformer/attention.py, ``get_query_key_value_tensors``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# S sequence on this rank, B micro-batch, N query heads and G key-value groups of all P ranks,
# D head size


def own_heads(mixed: Tensor, config: TransformerConfig, group: dist.ProcessGroup) -> Tensor:
    """[S, B, (N + 2 G) * D / P] -> [S, B, (N / P + 2) * D]: queries of this rank, key, value.

    The ranks gather their parts of the QKV projection; backward sums the gradients of a key and a
    value over the ranks that share it. Returned as it is if each rank has groups of its own.
    """
    groups = config.num_query_groups
    assert groups is not None  # set by Megatron's __post_init__
    if groups >= group.size():
        return mixed
    whole = all_gather_last_dim_from_tensor_parallel_region(mixed, group)
    sharing = group.size() // groups
    own_group, share = divmod(group.rank(), sharing)
    heads = whole.unflatten(-1, (groups, -1, config.kv_channels)).select(-3, own_group)
    num_queries = config.num_attention_heads // group.size()
    queries = heads.narrow(-2, share * num_queries, num_queries)
    # A copy, so that nothing keeps what was gathered alive until backward.
    return torch.cat((queries, heads[..., -2:, :]), -2).flatten(-2)
