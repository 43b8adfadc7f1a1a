"""Megatron optimizers for dense parameters and for expert-parallel parameters.

Both can be replicated over the data-parallel ranks or sharded over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from ascend_run.plugin_api import contracts as c

from .megatron_optimizers import Described, Float32, Replicated, Sharded

if TYPE_CHECKING:
    from megatron.core.optimizer.grad_scaler import MegatronGradScaler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule

ParamGroup: TypeAlias = dict[str, Any]
"""Parameters and their options, as torch's and Megatron's optimizers take them."""
_NO_INIT: Any = None
"""Function by which Megatron creates states to load its own checkpoints, which are not used."""


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
    param_groups: list[ParamGroup],
    spec: c.OptimizerSpec,
    options: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    kind: Kind,
    wrap: c.Wrapper[Any],
) -> Described:
    """Build an optimizer in which every data-parallel rank updates all parameters.

    Args:
        wrap: Returns the class to build of Megatron's.
    """
    holder = _holder(param_groups)
    optimizer: Described
    if options.bf16 or options.fp16:
        scaling = cast("MegatronGradScaler", scaler)  # without a scaler the loss is not scaled
        optimizer = wrap(Replicated)(holder, options, scaling, _NO_INIT)
    else:
        optimizer = wrap(Float32)(holder, options, _NO_INIT)
    _set_inner(optimizer, param_groups, spec)
    _set_groups(optimizer, kind.norm_group, kind.tp_group)
    return optimizer


def sharded(
    param_groups: list[ParamGroup],
    spec: c.OptimizerSpec,
    options: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    kind: Kind,
    bundle: c.ModelBundle,
    groups: ProcessGroupCollection,
    wrap: c.Wrapper[Any],
) -> Described:
    """Build an optimizer in which each data-parallel rank updates its shard, then all-gathers.

    Args:
        wrap: Returns the class to build of Megatron's.
    """
    with torch.no_grad():  # makes the parameter shards leaf tensors, which hold gradients
        optimizer: Described = wrap(Sharded)(
            _holder(param_groups),
            options,
            cast("MegatronGradScaler", scaler),
            _NO_INIT,
            model_chunks=cast("list[MegatronModule]", bundle.chunks),
            per_model_buffers={
                index: getattr(chunk, kind.buffers) for index, chunk in enumerate(bundle.chunks)
            },
            data_parallel_group=kind.data_parallel_group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=kind.norm_group.rank(),
            distributed_optimizer_instance_id=0,
        )
    _set_inner(optimizer, param_groups, spec)
    # Data-parallel replicas hold different shares, so the norm is summed over them too.
    _set_groups(optimizer, groups.intra_dist_opt, kind.tp_group)
    return optimizer


def _holder(param_groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Return an optimizer that only holds parameter groups while Megatron's is constructed.

    Megatron replaces the parameters of its groups by master weights or shards. The distributed
    optimizer accepts only Adam, the states of which its own checkpoints know; those are not used.
    """
    return torch.optim.AdamW([{**group} for group in param_groups])


def _set_inner(optimizer: Any, param_groups: list[ParamGroup], spec: c.OptimizerSpec) -> None:
    """Build the inner optimizer from the tensors that it updates, as Megatron replaced them."""
    stepped = [group["params"] for group in optimizer.optimizer.param_groups]
    optimizer.optimizer = spec.build(
        [{**group, "params": params} for group, params in zip(param_groups, stepped, strict=True)]
    )


def _set_groups(optimizer: Any, norm_group: dist.ProcessGroup, tp_group: dist.ProcessGroup) -> None:
    """Set the groups of Megatron's gradient statistics; none of its classes declares both."""
    optimizer.grad_stats_parallel_group = norm_group
    optimizer.tp_group = tp_group
