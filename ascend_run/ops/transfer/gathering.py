"""Asynchronous all-gather of tensors and reduce-scatter of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from .ring import Packing

# P ranks of the group


@attrs.frozen(eq=False)
class AllGatherWork:
    """An all-gather in flight."""

    packing: Packing
    _received: Tensor
    _sent: Tensor
    """Held so that its memory is not reused before the send is done."""
    _work: dist.Work | None

    def wait(self) -> Tensor:
        """Return [P, elements of a rank], each rank's in the layout of ``packing``."""
        if self._work is not None:
            self._work.wait()
        return self._received


def start_all_gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> AllGatherWork:
    """Start an all-gather; all ranks hold tensors of these shapes.

    Communication: one all-gather; none on one rank. Numerics: bitwise.
    """
    packing = Packing([x.shape for x in tensors])
    sent = packing.pack([*tensors])
    if group.size() == 1:
        return AllGatherWork(packing, sent[None], sent, None)
    received = sent.new_empty(group.size(), packing.numel)
    # gloo requires the shards concatenated along the tensor's first dim; so below.
    work = dist.all_gather_into_tensor(received.flatten(), sent, group=group, async_op=True)
    return AllGatherWork(packing, received, sent, work)


@attrs.frozen(eq=False)
class ReduceScatterWork:
    """A reduce-scatter in flight."""

    _received: Tensor
    _sent: Tensor
    _work: dist.Work | None

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received


def start_reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> ReduceScatterWork:
    """Start a reduce-scatter of [P, n], row r to rank r; ``parts`` must not be modified meanwhile.

    Communication: one reduce-scatter; none on one rank.
    """
    if group.size() == 1:
        return ReduceScatterWork(parts[0], parts, None)
    received = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(received, parts.flatten(), group=group, async_op=True)
    return ReduceScatterWork(received, parts, work)
