"""Asynchronous sends and receives of buffers between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist


@attrs.frozen(eq=False)
class SendReceiveWork:
    """A send to one rank and a receive from another, in flight."""

    _received: Tensor
    _sent: Tensor
    """Held so that its memory is not reused before the send is done."""
    _works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """Return the received buffer. From then on the sent one may be modified."""
        for work in self._works:
            work.wait()
        return self._received


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a small all-reduce before point-to-point calls in which some ranks take no part.

    NCCL and HCCL connect the ranks of a group in its first call, and wait there for all of them
    (torch, ``batch_isend_irecv``).
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def pass_on(
    buffer: Tensor, group: dist.ProcessGroup, *, by: int = 1, tag: int = 0
) -> SendReceiveWork:
    """Send a buffer ``by`` ranks ahead, and receive one of equal shape from as many behind.

    Returns at once; until ``wait`` the buffer must not be modified. Every rank of the group must
    call it in the same order.

    Args:
        buffer: Contiguous; of one shape and dtype on all ranks.
        by: 1 sends to the next rank, -1 to the previous one, modulo the group size.
        tag: Distinguishes two rings in flight at once, if the backend supports tags.

    Communication: one send and one receive. Numerics: bitwise.
    """
    rank, size = group.rank(), group.size()
    received = torch.empty_like(buffer)
    if by % size == 0:
        return SendReceiveWork(received.copy_(buffer), buffer, ())
    return send_receive(
        (buffer, (rank + by) % size), (received, (rank - by) % size), group, tag=tag
    )


def send_receive(
    sent: tuple[Tensor, int | None],
    received: tuple[Tensor, int | None],
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
) -> SendReceiveWork:
    """Send one buffer, and receive another; ``pass_on`` does so around a ring.

    Args:
        sent: Contiguous, and the destination rank; None: no send.
        received: Contiguous, overwritten, and the source rank; None: no receive.

    Communication: at most one send and one receive. Numerics: bitwise.
    """
    ends = ((dist.isend, *sent), (dist.irecv, *received))
    # Posted together: a backend that runs them in order could deadlock.
    operations = [
        dist.P2POp(operation, buffer, group=group, group_peer=peer, tag=tag)
        for operation, buffer, peer in ends
        if peer is not None
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return SendReceiveWork(received[0], sent[0], tuple(works))


class Packing:
    """The layout of tensors [S, ..., n_i, D_i] in one flat buffer, for a single send.

    Each is stored heads first, [..., n_i, S, D_i], so that a head's rows are contiguous in matmuls.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = [(*shape[1:-1], shape[0], shape[-1]) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self.numel = sum(self._sizes)

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Return [numel], of the tensors' dtype, which must be one; each is copied once."""
        flat = tensors[0].new_empty(self.numel)
        for place, tensor in zip(self.views(flat), tensors, strict=True):
            place.copy_(tensor)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the tensors in a buffer [numel]."""
        parts = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [part.view(shape).movedim(-2, 0) for part, shape in parts]
