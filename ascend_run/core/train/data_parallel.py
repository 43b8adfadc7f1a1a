"""Gradient reduction: Megatron's DistributedDataParallel, or none if no rank shares gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.types.config import RunConfig

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class LocalGradients(_BaseDataParallel):
    """Megatron's data-parallel interface for a model whose gradients no other rank shares.

    Uses autograd's ``.grad`` directly, without a gradient buffer. Every step saves the passes over
    all gradients that fill, zero and read the buffer.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig()  # Megatron reads its FSDP flag

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """No-op: there is no communication to wait for."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for dtype, gradients in by_dtype.items():
            factor: float | Tensor | list[Tensor] = scaling_factor
            if isinstance(factor, Tensor) and dtype != factor.dtype and factor.device.type != "cpu":
                # With a dimension: a device rounds a factor without one to the gradients' dtype.
                factor = [factor.view(1)] * len(gradients)
            torch._foreach_mul_(gradients, factor)

    def zero_grad_buffer(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


def wrap_data_parallel(
    bundle: c.ModelBundle,
    config: RunConfig,
    hooks: Hooks,
    groups: ProcessGroupCollection,
    num_microbatches: int,
) -> None:
    """Wrap every chunk of a trained model for gradient reduction."""
    builder = hooks.provide_builder("ascend_data_parallel", config=config)
    # Tensor-parallel ranks also share gradients: those of norms and of replicated experts.
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
    """Complete the parameter all-gathers that ``overlap_param_gather`` defers to the next forward.

    Must be called on all ranks before weights are read.
    """
    for chunk in bundle.chunks:
        if getattr(chunk, "use_forward_hook", False):
            cast(DistributedDataParallel, chunk).start_param_sync(force_sync=True)


def _adds_exactly(precision: str, num_microbatches: int) -> bool:
    """Return whether gradients can stay in the parameters' dtype, without float32 buffers.

    Half-precision gradients of several micro-batches are accumulated in float32. fp16 needs float32
    even for one micro-batch: the sum over tokens, which is divided by their number, would
    leave its range.
    """
    return precision == "fp32" or (precision == "bf16" and num_microbatches == 1)
