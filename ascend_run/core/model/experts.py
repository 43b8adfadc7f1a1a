"""Parameters of the experts, and the reference computation that a plugin may replace.

Shapes and names do not depend on the computation, and therefore neither do checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from ascend_run.core.config.built_in import experts_problems
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import ConfigError

from .assembly import Assembly

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# T tokens sent to this rank's experts, H hidden size, F expert FFN size, X experts on this rank


def loop_experts(
    tokens_TH: Tensor,
    tokens_per_expert: Sequence[int],
    probs_T: Tensor,
    weights: c.ExpertWeights,
    activation: c.ExpertActivation,
) -> Tensor:
    """Compute one expert after the other: contracts.ExpertsKernel with plain matmuls.

    The weights are unbound once: indexing the stacked tensor would allocate a zero-filled gradient
    of the full stack for each expert.
    """
    outputs = []
    parts = zip(
        tokens_TH.split(list(tokens_per_expert)),
        probs_T.split(list(tokens_per_expert)),
        weights.fc1.unbind(0),
        weights.fc2.unbind(0),
        strict=True,
    )
    for x, prob, fc1, fc2 in parts:
        hidden = _activated(x @ fc1.t(), activation)
        outputs.append((hidden * prob.unsqueeze(-1).to(hidden.dtype)) @ fc2.t())
    return torch.cat(outputs)


def _activated(hidden: Tensor, activation: c.ExpertActivation) -> Tensor:
    if activation.fused is not None:
        return activation.fused(hidden)
    if not activation.gated:
        return activation.function(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return activation.function(gate) * up


class Experts(MegatronModule):
    """Stacked gated MLPs, in the experts slot of Megatron's MoELayer.

    Parameters: ``fc1`` [X, 2F, H] (gate rows, then up rows; [X, F, H] without gating) and ``fc2``
    [X, H, F]. With expert tensor parallelism F is this rank's shard: the dispatcher all-gathers the
    tokens of the ranks before and reduce-scatters their partial outputs after.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        assembly: Assembly,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if problems := list(experts_problems(config)):  # a plugin may have changed it
            raise ConfigError("the experts cannot do this", problems)
        self.num_local_experts = num_local_experts
        self.groups = pg_collection
        self.compute = assembly.experts_kernel
        gated, is_silu = config.gated_linear_unit, assembly.model.activation == "silu"
        self.activation = c.ExpertActivation(
            function=config.activation_func,
            gated=gated,
            is_silu=is_silu,
            fused=assembly.ops.swiglu if gated and is_silu else None,
        )
        tp_size = get_pg_size(pg_collection.expt_tp)
        width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) // tp_size
        rows = 2 * width if config.gated_linear_unit else width
        empty = partial(torch.empty, dtype=config.params_dtype, device=assembly.device)
        self.fc1 = nn.Parameter(empty(num_local_experts, rows, config.hidden_size))
        self.fc2 = nn.Parameter(empty(num_local_experts, config.hidden_size, width))
        # Tensor-parallel ranks that do not shard experts hold replicas that process different
        # tokens, so these gradients are reduced over the experts' own data-parallel group.
        as_dense = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        for parameter, dim in ((self.fc1, 1), (self.fc2, 2)):
            if tp_size > 1:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            # Megatron reduces the gradient of a parameter with allreduce=False over the experts'
            # own data-parallel group.
            mark(parameter, allreduce=as_dense)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """[T, H], counts [X], [T] -> ([T, H], None for the bias)."""
        counts = tokens_per_expert.tolist()
        weights = c.ExpertWeights(self.fc1, self.fc2)
        out = self.compute(
            permuted_local_hidden_states, counts, permuted_probs, weights, self.activation
        )
        return out, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Return the stacked tensors, sharded over experts and over the FFN size of each."""
        groups, axis = self.groups, len(sharded_offsets)
        experts = (axis, get_pg_rank(groups.ep), get_pg_size(groups.ep))
        tp_rank, tp_size = get_pg_rank(groups.expt_tp), get_pg_size(groups.expt_tp)
        replica = (0, 0, get_pg_rank(groups.expt_dp))

        def shard(
            key: str, part: Tensor, width: tuple[int, int, int], replica: tuple[int, int, int]
        ) -> ShardedTensor:
            result: ShardedTensor = ShardedTensor.from_rank_offsets(
                key,
                part,
                *sharded_offsets,
                experts,
                width,
                replica_id=replica,
                prepend_axis_num=axis,
            )
            return result

        def gate_and_up(key: str, fc1: Tensor, replica: Any, _: object) -> list[ShardedTensor]:
            return [
                shard(key, half, (axis + 1, place * tp_size + tp_rank, 2 * tp_size), replica)
                for place, half in enumerate(fc1.chunk(2, dim=1))
            ]

        fc1, fc2 = f"{prefix}fc1", f"{prefix}fc2"
        sharded: dict[str, ShardedTensor | ShardedTensorFactory] = {
            fc1: shard(fc1, self.fc1, (axis + 1, tp_rank, tp_size), replica),
            fc2: shard(fc2, self.fc2, (axis + 2, tp_rank, tp_size), replica),
        }
        if tp_size > 1 and self.activation.gated:
            # The gate rows and the up rows are sharded separately. The factory accepts any tree of
            # tensors and, as in Megatron's own factories, lists.
            build, merge = cast("Any", gate_and_up), cast("Any", partial(torch.cat, dim=1))
            sharded[fc1] = ShardedTensorFactory(fc1, self.fc1, build, merge, replica)
        return sharded
