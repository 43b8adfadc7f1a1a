"""One of Megatron's optimizers for the dense parameters, one for experts with ranks of their own.

Either is replicated on the data-parallel ranks, or spread over them.
"""

from __future__ import annotations

from typing import Any

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


@attrs.frozen
class Kind:
    """Dense parameters or experts' own: which ranks share what."""

    is_expert: bool
    norm_group: Any
    """Ranks that hold different parameters."""
    tp_group: Any
    """Ranks that hold parts of one parameter."""
    data_parallel_group: Any
    """Ranks that hold the same parameters."""
    buffers: str
    """Attribute of Megatron's DistributedDataParallel with their gradients."""


def dense_kind(groups: Any) -> Kind:
    """Every parameter that the ranks hold as they hold the dense ones."""
    return Kind(False, groups.mp, groups.tp, groups.intra_dp_cp, "buffers")


def expert_kind(groups: Any) -> Kind:
    """Experts whose ranks are not those of the dense parameters."""
    own = "expert_parallel_buffers"
    return Kind(True, groups.tp_ep_pp, groups.expt_tp, groups.intra_expt_dp, own)


def anywhere(here: bool) -> bool:
    """Whether it is so on any rank of the run."""
    flag = torch.tensor(int(here), device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def replicated(
    inner: torch.optim.Optimizer, options: OptimizerConfig, scaler: Any, kind: Kind
) -> MegatronOptimizer:
    """Every data-parallel rank steps every parameter."""
    optimizer: MegatronOptimizer
    if options.bf16 or options.fp16:
        optimizer = Float16OptimizerWithFloat16Params(inner, options, scaler, _init_adam_state)
    else:
        optimizer = FP32Optimizer(inner, options, _init_adam_state)
    # Where Megatron looks for the group of its gradient statistics.
    optimizer.grad_stats_parallel_group = kind.norm_group
    optimizer.tp_group = kind.tp_group
    return optimizer


def spread(
    inner: torch.optim.Optimizer,
    options: OptimizerConfig,
    scaler: Any,
    kind: Kind,
    bundle: c.ModelBundle,
    groups: Any,
) -> MegatronOptimizer:
    """Each data-parallel rank steps its share, and they gather the rest.

    Raises:
        ConfigError: A plugin's optimizer is none that Megatron can spread.
    """
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise ConfigError(
            f"ddp.use_distributed_optimizer=true spreads Adam and AdamW only, not "
            f"{type(inner).__name__}, which a plugin asks for; set it to false"
        )
    with torch.no_grad():  # so that shares of parameters are leaves, which hold gradients
        optimizer = DistributedOptimizer(
            inner,
            options,
            scaler,
            _init_adam_state,
            model_chunks=bundle.chunks,
            per_model_buffers={
                index: getattr(chunk, kind.buffers) for index, chunk in enumerate(bundle.chunks)
            },
            data_parallel_group=kind.data_parallel_group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=kind.norm_group.rank(),
            distributed_optimizer_instance_id=0,
        )
    # Replicas hold different shares, so that the norm is summed over them too.
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = kind.tp_group
    return optimizer


def _init_adam_state(inner: torch.optim.Optimizer, config: Any = None) -> None:
    """The state that AdamW makes in its first step, made before it so that it can be loaded."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
