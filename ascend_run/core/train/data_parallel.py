"""Gradient reduction: Megatron's DistributedDataParallel, or none where one rank holds it all."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.config import RunConfig


class LocalGradients(_BaseDataParallel):
    """Megatron's data-parallel interface for a model whose gradients no other rank shares.

    Autograd's own ``.grad`` is the gradient: no buffer is filled, zeroed or read again, which
    saves a pass over all of them in every step.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig()  # Megatron looks for FSDP in it

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Nothing to wait for."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)

    def zero_grad_buffer(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


def wrap_data_parallel(
    bundle: c.ModelBundle, config: RunConfig, hooks: Hooks, groups: Any, num_microbatches: int
) -> None:
    """Put every chunk of a model that trains behind its gradient reduction."""
    builder = hooks.provide("ascend_data_parallel", config=config)
    # Tensor-parallel ranks share gradients too: those of norms and of experts that are not spread.
    alone = groups.tp_dp_cp.size() == 1
    exact = _adds_exactly(config.train.precision, num_microbatches)
    options = config.ddp
    plain = not (options.use_distributed_optimizer or options.overlap_grad_reduce)
    if builder is None and alone and exact and plain:
        bundle.chunks = [LocalGradients(bundle.transformer_config, m) for m in bundle.chunks]
        return
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.train.precision != "fp32",
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bucket_size=options.bucket_size,
    )
    bundle.chunks = [
        (builder or DistributedDataParallel)(
            config=bundle.transformer_config,
            ddp_config=ddp_config,
            module=chunk,
            pg_collection=groups,
        )
        for chunk in bundle.chunks
    ]


def gather_parameters(bundle: c.ModelBundle) -> None:
    """End what ``overlap_param_gather`` puts off to the next forward: after it every parameter is
    whole on every rank that holds it. Called on all of them, before anybody reads weights."""
    for chunk in bundle.chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)


def _adds_exactly(precision: str, num_microbatches: int) -> bool:
    """Whether gradients may stay in the parameters' dtype, without Megatron's float32 buffers.

    Half-precision micro-batches are summed in float32. In fp16 one alone needs it too: the sum
    over tokens, divided by their number, would leave its narrow range.
    """
    return precision == "fp32" or (precision == "bf16" and num_microbatches == 1)
