"""Every rank's tensors on every rank, and their gradients' sums back home, while something else is
computed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from .ring import Packing

# P ranks of the group


@attrs.frozen(eq=False)
class Gathering:
    """Tensors of all ranks on their way here."""

    packing: Packing
    _received: Tensor
    _sent: Tensor
    """Held so that its memory is not given to anything else before it has left."""
    _work: dist.Work | None

    def wait(self) -> Tensor:
        """[P, numbers of a rank], each rank's as ``packing`` lays them."""
        if self._work is not None:
            self._work.wait()
        return self._received


def gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Gathering:
    """Begin to bring every rank's tensors here; all ranks hold tensors of these shapes.

    Messages: one all-gather; none on one rank. Numerics: bitwise.
    """
    packing = Packing([x.shape for x in tensors])
    sent = packing.pack([*tensors])
    if group.size() == 1:
        return Gathering(packing, sent[None], sent, None)
    received = sent.new_empty(group.size(), packing.numel)
    # gloo wants the pieces one after the other along the tensor's own first dimension; so below.
    work = dist.all_gather_into_tensor(received.flatten(), sent, group=group, async_op=True)
    return Gathering(packing, received, sent, work)


@attrs.frozen(eq=False)
class Summing:
    """A rank's share of sums over all ranks, on its way here."""

    _received: Tensor
    _sent: Tensor
    _work: dist.Work | None

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received


def sum_home(parts: Tensor, group: dist.ProcessGroup) -> Summing:
    """Begin to sum [P, n] over the ranks, row r of which goes to rank r; it may not be written to.

    Messages: one reduce-scatter; none on one rank.
    """
    if group.size() == 1:
        return Summing(parts[0], parts, None)
    received = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(received, parts.flatten(), group=group, async_op=True)
    return Summing(received, parts, work)
