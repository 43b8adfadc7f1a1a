"""Passing buffers round a ring of ranks while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist


@attrs.frozen(eq=False)
class Passing:
    """A buffer on its way to a neighbour, and the other neighbour's on its way here."""

    _received: Tensor
    _sent: Tensor
    """Held so that its memory is not given to anything else before it has left."""
    _works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """The buffer that has come. The one that was sent may be written to from here on."""
        for work in self._works:
            work.wait()
        return self._received


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """A small message of all ranks, before those in which some take no part.

    NCCL and HCCL connect the ranks of a group in its first call, and wait there for all of them
    (torch, ``batch_isend_irecv``).
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def pass_on(buffer: Tensor, group: dist.ProcessGroup, *, by: int = 1, tag: int = 0) -> Passing:
    """Send a buffer ``by`` ranks ahead, and receive the like from as many behind.

    It returns at once; until ``wait`` the buffer may be read and not be written. Every rank of the
    group calls it in the same order.

    Args:
        buffer: Contiguous; of one shape and dtype on all ranks.
        by: 1 to the next rank, -1 to the one before; round the end of the group.
        tag: Tells two rings apart that are under way at once, where the backend knows tags.

    Messages: one sent and one received. Numerics: bitwise.
    """
    rank, size = group.rank(), group.size()
    received = torch.empty_like(buffer)
    if by % size == 0:
        return Passing(received.copy_(buffer), buffer, ())
    return post((buffer, (rank + by) % size), (received, (rank - by) % size), group, tag=tag)


def post(
    sent: tuple[Tensor, int | None],
    received: tuple[Tensor, int | None],
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
) -> Passing:
    """Send one buffer, and receive another; see ``pass_on``, which does so round a ring.

    Args:
        sent: Contiguous, and the rank that it goes to; None: to nobody.
        received: Contiguous, to be written to, and the rank that it comes from; None: from nobody.

    Messages: at most one sent and one received. Numerics: bitwise.
    """
    ends = ((dist.isend, *sent), (dist.irecv, *received))
    # Posted together: a backend that runs them in order could wait on both sides for ever.
    operations = [
        dist.P2POp(operation, buffer, group=group, group_peer=peer, tag=tag)
        for operation, buffer, peer in ends
        if peer is not None
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Passing(received[0], sent[0], tuple(works))


class Packing:
    """Where tensors [S, ..., n_i, D_i] lie in one flat buffer, so that they travel as one message.

    Each lies with its heads first, [..., n_i, S, D_i], so that a head's rows are beside each other
    when they are multiplied.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = [(*shape[1:-1], shape[0], shape[-1]) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self.numel = sum(self._sizes)

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """[numel], of the tensors' dtype, which must be one; each is copied once."""
        flat = tensors[0].new_empty(self.numel)
        for place, tensor in zip(self.views(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a buffer [numel]."""
        parts = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [part.view(shape).movedim(-2, 0) for part, shape in parts]
