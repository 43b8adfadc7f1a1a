"""How keys and values come to the rank that attends to them, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.all_to_all import heads_to_sequence, sequence_to_heads
from ascend_run.ops.transfer.columns import Columns

from .head_shares import Cut, HeadShare

# As in head_exchange


@attrs.frozen
class Places:
    """Who has which heads, and which part of the sequence."""

    group: dist.ProcessGroup
    shares: tuple[HeadShare, ...]
    query_lengths: Sequence[int]
    """Positions of each rank; so for the next."""
    key_lengths: Sequence[int]

    @property
    def share(self) -> HeadShare:
        """This rank's."""
        return self.shares[self.group.rank()]

    @property
    def queries(self) -> Cut:
        return tuple(share.queries for share in self.shares)

    @property
    def groups(self) -> Cut:
        return tuple(share.groups for share in self.shares)


class KeyRoad(Protocol):
    """q, k and v are [s, B, N or G, D or E] on this side, [S, B, n or g, D or E] on the other."""

    def bring(
        self, q: Tensor, k: Tensor, v: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The whole sequence's of this rank's heads."""
        ...

    def bring_again(
        self, dout: Tensor, again: Mapping[str, Tensor], places: Places
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output's gradient, and what was not kept of k and v, by name."""
        ...

    def take_back(
        self, dq: Tensor, dk: Tensor, dv: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's positions, summed over the ranks that had the head."""
        ...


class ExchangedKeys:
    """In the all-to-all of the queries; a rank gets the key-value heads that it needs."""

    def bring(
        self, q: Tensor, k: Tensor, v: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole_q, whole_k, whole_v = _together(heads_to_sequence, (q, k, v), places)
        return whole_q, whole_k, whole_v

    def bring_again(
        self, dout: Tensor, again: Mapping[str, Tensor], places: Places
    ) -> tuple[Tensor, dict[str, Tensor]]:
        whole_dout, *came = _together(heads_to_sequence, (dout, *again.values()), places)
        return whole_dout, dict(zip(again, came, strict=True))

    def take_back(
        self, dq: Tensor, dk: Tensor, dv: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _together(sequence_to_heads, (dq, dk, dv), places)
        return dq, dk, dv


def _together(
    exchange: Callable[..., list[Tensor]], tensors: Sequence[Tensor], places: Places
) -> list[Tensor]:
    """The queries' heads first, keys' and values' after: one message, or two of two lengths."""
    cuts = (places.queries, *(places.groups for _ in tensors[1:]))
    group, lengths = places.group, places.query_lengths
    if len(tensors) == 1 or [*places.key_lengths] == [*lengths]:
        return exchange(tensors, group, cuts=cuts, lengths=lengths)
    return [
        *exchange(tensors[:1], group, cuts=cuts[:1], lengths=lengths),
        *exchange(tensors[1:], group, cuts=cuts[1:], lengths=places.key_lengths),
    ]


class GatheredKeys(ExchangedKeys):
    """By an all-gather over the sequence, where all ranks need one and the same key-value head; the
    parts of the ranks have one length.

    Their gradients go back in the message of the queries': a reduce-scatter would send as many
    bytes, and round after every rank that it adds.
    """

    def bring(
        self, q: Tensor, k: Tensor, v: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        (whole_q,) = heads_to_sequence((q,), places.group, cuts=(places.queries,))
        whole_k, whole_v = _gathered((k, v), places.group)
        return whole_q, whole_k, whole_v

    def bring_again(
        self, dout: Tensor, again: Mapping[str, Tensor], places: Places
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (whole_dout,) = heads_to_sequence((dout,), places.group, cuts=(places.queries,))
        came = _gathered([*again.values()], places.group) if again else []
        return whole_dout, dict(zip(again, came, strict=True))


def _gathered(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[s, B, G, D] -> [S, B, G, D], in one message."""
    columns = Columns(tensors)
    send = columns.pack(tensors)
    received = send.new_empty((send.shape[0] * group.size(), *send.shape[1:]))
    dist.all_gather_into_tensor(received, send, group=group)
    return columns.unpack(received)
