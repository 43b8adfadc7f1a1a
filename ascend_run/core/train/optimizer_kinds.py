"""Megatron optimizers for dense parameters and for expert-parallel parameters.

Both can be replicated over the data-parallel ranks or sharded over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.optimizer.grad_scaler import MegatronGradScaler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule


@attrs.frozen
class Kind:
    """The process groups of one kind of parameters, dense or expert."""

    is_expert: bool
    norm_group: dist.ProcessGroup
    """Ranks over which gradient norms are summed."""
    tp_group: dist.ProcessGroup
    """Tensor-parallel ranks."""
    data_parallel_group: dist.ProcessGroup
    """Ranks that hold the same parameters."""
    buffers: str
    """Attribute of Megatron's DistributedDataParallel that holds their gradient buffers."""


def dense_kind(groups: ProcessGroupCollection) -> Kind:
    """Return the kind of all parameters that use the dense process groups."""
    return Kind(False, groups.mp, groups.tp, groups.intra_dp_cp, "buffers")


def expert_kind(groups: ProcessGroupCollection) -> Kind:
    """Return the kind of experts that have process groups of their own."""
    own = "expert_parallel_buffers"
    return Kind(True, groups.tp_ep_pp, groups.expt_tp, groups.intra_expt_dp, own)


def any_rank(here: bool) -> bool:
    """Return whether ``here`` is true on any rank of the run."""
    flag = torch.tensor(int(here)).cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def replicated(
    inner: torch.optim.Optimizer,
    options: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    kind: Kind,
) -> MegatronOptimizer:
    """Build an optimizer in which every data-parallel rank updates all parameters."""
    optimizer: MegatronOptimizer
    if options.bf16 or options.fp16:
        scaling = cast("MegatronGradScaler", scaler)  # without a scaler the loss is not scaled
        optimizer = Float16OptimizerWithFloat16Params(inner, options, scaling, _init_adam_state)
    else:
        optimizer = FP32Optimizer(inner, options, _init_adam_state)
    _set_groups(optimizer, kind.norm_group, kind.tp_group)
    return optimizer


def sharded(
    inner: torch.optim.Optimizer,
    options: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    kind: Kind,
    bundle: c.ModelBundle,
    groups: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Build an optimizer in which each data-parallel rank updates its shard, then all-gathers.

    Raises:
        ConfigError: Megatron cannot shard the optimizer that a plugin provides.
    """
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise ConfigError(
            f"ddp.use_distributed_optimizer=true spreads Adam and AdamW only, not "
            f"{type(inner).__name__}, which a plugin asks for; set it to false"
        )
    with torch.no_grad():  # makes the parameter shards leaf tensors, which hold gradients
        optimizer = DistributedOptimizer(
            inner,
            options,
            cast("MegatronGradScaler", scaler),
            _init_adam_state,
            model_chunks=cast("list[MegatronModule]", bundle.chunks),
            per_model_buffers={
                index: getattr(chunk, kind.buffers) for index, chunk in enumerate(bundle.chunks)
            },
            data_parallel_group=kind.data_parallel_group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=kind.norm_group.rank(),
            distributed_optimizer_instance_id=0,
        )
    # Data-parallel replicas hold different shares, so the norm is summed over them too.
    _set_groups(optimizer, groups.intra_dist_opt, kind.tp_group)
    return optimizer


def _set_groups(optimizer: Any, norm_group: dist.ProcessGroup, tp_group: dist.ProcessGroup) -> None:
    """Set the groups of Megatron's gradient statistics; none of its classes declares both."""
    optimizer.grad_stats_parallel_group = norm_group
    optimizer.tp_group = tp_group


def _init_adam_state(inner: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Create AdamW's state before its first step, so that a checkpoint can be loaded into it."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
