"""Job of a pool: gradients reduced bucket by bucket."""

from __future__ import annotations

import torch
from torch import distributed

from ascend_run.testing.effects import count_both
from ascend_run.testing.gloo_on_device import bucket_by_bucket


def reduced(device_type: str, async_ops: bool) -> tuple[list[float], dict[str, int]]:
    """Return two sums over the ranks, and the collectives that computed them."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = distributed.group.WORLD
    tensors = [torch.full((3,), float(distributed.get_rank() + index)) for index in (1, 10)]
    with bucket_by_bucket(device_type), count_both() as (_, collectives):
        with buffers._coalescing_manager(group, async_ops=async_ops) as handle:
            for tensor in tensors:
                distributed.all_reduce(tensor, group=group, async_op=async_ops)
        if async_ops:
            handle.wait()
    return [tensor.mean().item() for tensor in tensors], dict(collectives.calls)
