"""Jobs of a pool: gradients reduced bucket by bucket, what is sent through the host, and unequal
parts of collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ascend_run.testing.effects import count_both
from ascend_run.testing.gloo_on_device import gloo_on_device, padded, through_host


def reduced(device_type: str, async_ops: bool) -> tuple[list[float], dict[str, int]]:
    """Return two sums over the ranks, and the collectives that computed them."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = distributed.group.WORLD
    tensors = [torch.full((3,), float(distributed.get_rank() + index)) for index in (1, 10)]
    with gloo_on_device(device_type), count_both() as (_, collectives):
        with buffers._coalescing_manager(group, async_ops=async_ops) as handle:
            for tensor in tensors:
                distributed.all_reduce(tensor, group=group, async_op=async_ops)
        if async_ops:
            handle.wait()
    return [tensor.mean().item() for tensor in tensors], dict(collectives.calls)


def scattered(device_type: str) -> tuple[list[float], list[float]]:
    """Return this rank's share of a sum over the ranks, before and after the wait for it."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = distributed.group.WORLD
    parts, share = torch.arange(4.0) + distributed.get_rank(), torch.zeros(2)
    with gloo_on_device(device_type):
        with buffers._coalescing_manager(group, async_ops=True) as handle:
            buffers.dist_reduce_scatter_func(share, parts, group=group, async_op=True)
        before = share.tolist()
        handle.wait()
    return before, share.tolist()


def passed_on(copied: bool, batched: bool) -> dict[str, Any]:
    """Send to the next rank and receive from the one before, as if tensors were on a device or
    not."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ends = ((distributed.isend, distributed.irecv),)
    sent, received = torch.full((3, 2), rank + 1.0), torch.zeros(3, 2, requires_grad=True)
    with through_host(lambda tensor: copied), count_both() as (_, collectives):
        following, before = (rank + 1) % size, (rank - 1) % size
        if batched:
            operations = [
                distributed.P2POp(distributed.isend, sent, following),
                distributed.P2POp(distributed.irecv, received, before),
            ]
            works = distributed.batch_isend_irecv(operations)
        else:
            works = [
                distributed.isend(tensor=sent, dst=following),
                distributed.irecv(received, before),
            ]
        replaced = (distributed.isend, distributed.irecv) not in ends
        distributed.barrier()
        on_arrival = received.mean().item()
        for work in works:
            work.wait()
    return {
        "replaced": replaced,
        "restored": (distributed.isend, distributed.irecv) in ends,
        "before the wait": on_arrival,
        "received": received.unique().tolist(),
        "calls": {name: collectives.calls[name] for name in ("send", "recv_")},
    }


def unequal(copied: bool) -> tuple[list[list[float]], list[float]]:
    """Gather rows, one more of each rank, and sum as many for each, as if tensors were on a device
    or not."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    gathered = [torch.zeros(other + 1, 2) for other in range(size)]
    parts = [torch.full((other + 1, 2), rank + 10.0 * other) for other in range(size)]
    summed = torch.zeros(rank + 1, 2)
    with padded(lambda tensor: copied):
        distributed.all_gather(gathered, torch.full((rank + 1, 2), rank + 1.0))
        distributed.reduce_scatter(summed, parts)
    return [part[:, 0].tolist() for part in gathered], summed[:, 0].tolist()
