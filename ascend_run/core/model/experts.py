"""Parameters of the experts.

Shapes and names do not depend on the computation, and therefore neither do checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.ops.tensor_marks import mark
from ascend_run.plugin_api import contracts as c

from .assembly import Assembly

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# T tokens sent to this rank's experts, H hidden size, F expert FFN size, X experts on this rank


def call_experts_by_dispatcher(layer: Any) -> None:
    """Have the token dispatcher of a MoELayer call the experts, if it has ``compute_experts``.

    The layer stays an instance of Megatron's class, the only one that gets its process groups.
    """
    compute = getattr(layer.token_dispatcher, "compute_experts", None)
    if compute is not None:
        layer.routed_experts_compute = lambda rows, probs: (
            compute(layer.experts, rows, probs),
            None,
        )


def mlp_activation(config: TransformerConfig, assembly: Assembly) -> c.ExpertActivation:
    """Return the activation of the model's MLPs: the platform's SwiGLU, if it is one."""
    activation = c.ExpertActivation(
        function=config.activation_func,
        gated=config.gated_linear_unit,
        is_silu=assembly.model.activation == "silu",
        clamp=config.activation_func_clamp_value,
        offset=config.glu_linear_offset,
    )
    fused = assembly.ops.swiglu if activation.is_swiglu else None
    return attrs.evolve(activation, fused=fused)


class Experts(MegatronModule):
    """Stacked gated MLPs, in the experts slot of Megatron's MoELayer.

    Parameters: ``fc1`` [X, 2F, H] (gate rows, then up rows; [X, F, H] without gating), ``fc2``
    [X, H, F], and with ``add_expert_bias`` ``fc1_bias`` [X, 2F] and ``fc2_bias`` [X, H]. With
    expert tensor parallelism F is this rank's shard: the dispatcher all-gathers the tokens of the
    ranks before and reduce-scatters their partial outputs after.
    """

    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

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
        self.num_local_experts = num_local_experts
        self.groups = pg_collection
        self.compute = assembly.experts_kernel
        self.counts_on_device = getattr(self.compute, "counts_on_device", False)
        self.activation = mlp_activation(config, assembly)
        tp_size = get_pg_size(pg_collection.expt_tp)
        width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) // tp_size
        rows = 2 * width if config.gated_linear_unit else width
        empty = partial(torch.empty, dtype=config.params_dtype, device=assembly.device)
        self.fc1 = nn.Parameter(empty(num_local_experts, rows, config.hidden_size))
        self.fc2 = nn.Parameter(empty(num_local_experts, config.hidden_size, width))
        has_biases = linear_biases(assembly.model).experts
        for name, size in (("fc1_bias", rows), ("fc2_bias", config.hidden_size)):
            bias = nn.Parameter(empty(num_local_experts, size)) if has_biases else None
            self.register_parameter(name, bias)
        # Tensor-parallel ranks that do not shard experts hold replicas that process different
        # tokens, so these gradients are reduced over the experts' own data-parallel group.
        as_dense = (
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        if tp_size > 1:
            for parameter, dim in ((self.fc1, 1), (self.fc2, 2)):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        for parameter in self.parameters():
            # Megatron reduces the gradient of a parameter with allreduce=False over the experts'
            # own data-parallel group.
            mark(parameter, allreduce=as_dense)

    def forward(
        self,
        rows_TH: Tensor,
        counts_X: Tensor,
        probs_T: Tensor,
        weights: c.ExpertWeights | None = None,
    ) -> tuple[Tensor, None]:
        """Return [T, H], and None for the bias.

        Args:
            weights: Of the X experts that the rows are for; default: all of this rank's.
        """
        device = self.fc1.device if self.counts_on_device else None
        counts = counts_X.to(device, non_blocking=True) if device else counts_X.tolist()
        if weights is None:
            weights = c.ExpertWeights(self.fc1, self.fc2, self.fc1_bias, self.fc2_bias)
        return self.compute(rows_TH, counts, probs_T, weights, self.activation), None

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
        for name, bias in ((f"{fc1}_bias", self.fc1_bias), (f"{fc2}_bias", self.fc2_bias)):
            if bias is not None:  # never sharded within an expert
                sharded[name] = shard(name, bias, (axis + 1, 0, 1), replica)
        if tp_size > 1 and self.activation.gated:
            # The gate rows and the up rows are sharded separately. The factory accepts any tree of
            # tensors and, as in Megatron's own factories, lists.
            build, merge = cast("Any", gate_and_up), cast("Any", partial(torch.cat, dim=1))
            sharded[fc1] = ShardedTensorFactory(fc1, self.fc1, build, merge, replica)
        return sharded
