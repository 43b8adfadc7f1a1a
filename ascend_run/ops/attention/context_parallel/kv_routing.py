"""KV routing of the head all-to-all: by all-to-all or by all-gather, and the gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_shares import HeadRanges, HeadShare
from ascend_run.ops.transfer.all_to_all import heads_to_sequence, sequence_to_heads
from ascend_run.ops.transfer.columns import Columns

# Dims as in head_all_to_all


@attrs.frozen
class Distribution:
    """Which rank has which heads and which part of the sequence."""

    group: dist.ProcessGroup
    shares: tuple[HeadShare, ...]
    query_lengths: Sequence[int]
    """Positions of each rank; ``key_lengths`` alike."""
    key_lengths: Sequence[int]

    @property
    def share(self) -> HeadShare:
        """This rank's share."""
        return self.shares[self.group.rank()]

    @property
    def queries(self) -> HeadRanges:
        return tuple(share.queries for share in self.shares)

    @property
    def groups(self) -> HeadRanges:
        return tuple(share.groups for share in self.shares)


class KvRouting(Protocol):
    """A KV routing; q, k and v are [s, B, N or G, D or E] before, [S, B, n or g, D or E] after
    it."""

    def dispatch(
        self, q: Tensor, k: Tensor, v: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the full sequence of this rank's heads."""
        ...

    def redispatch(
        self, dout: Tensor, unsaved: Mapping[str, Tensor], distribution: Distribution
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output's gradient, and k and v as far as they were not saved, by name."""
        ...

    def return_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of this rank's positions, summed over the ranks that used a head."""
        ...


class AllToAllKv:
    """Sends keys and values in the queries' all-to-all; a rank gets the key-value heads it
    needs."""

    def dispatch(
        self, q: Tensor, k: Tensor, v: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor, Tensor]:
        full_q, full_k, full_v = _together(heads_to_sequence, (q, k, v), distribution)
        return full_q, full_k, full_v

    def redispatch(
        self, dout: Tensor, unsaved: Mapping[str, Tensor], distribution: Distribution
    ) -> tuple[Tensor, dict[str, Tensor]]:
        full_dout, *received = _together(heads_to_sequence, (dout, *unsaved.values()), distribution)
        return full_dout, dict(zip(unsaved, received, strict=True))

    def return_gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _together(sequence_to_heads, (dq, dk, dv), distribution)
        return dq, dk, dv


def _together(
    exchange: Callable[..., list[Tensor]], tensors: Sequence[Tensor], distribution: Distribution
) -> list[Tensor]:
    """Run one all-to-all, or two if queries and keys differ in length."""
    head_ranges = (distribution.queries, *(distribution.groups for _ in tensors[1:]))
    group, lengths = distribution.group, distribution.query_lengths
    if len(tensors) == 1 or [*distribution.key_lengths] == [*lengths]:
        return exchange(tensors, group, head_ranges=head_ranges, lengths=lengths)
    return [
        *exchange(tensors[:1], group, head_ranges=head_ranges[:1], lengths=lengths),
        *exchange(
            tensors[1:], group, head_ranges=head_ranges[1:], lengths=distribution.key_lengths
        ),
    ]


class AllGatherKv(AllToAllKv):
    """All-gathers keys and values over the sequence; requires that all ranks need the same single
    key-value head and hold equal lengths.

    Their gradients return in the all-to-all of the queries': a reduce-scatter would send as many
    bytes, and round after every rank that it adds.
    """

    def dispatch(
        self, q: Tensor, k: Tensor, v: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor, Tensor]:
        (full_q,) = heads_to_sequence((q,), distribution.group, head_ranges=(distribution.queries,))
        full_k, full_v = _gathered((k, v), distribution.group)
        return full_q, full_k, full_v

    def redispatch(
        self, dout: Tensor, unsaved: Mapping[str, Tensor], distribution: Distribution
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (full_dout,) = heads_to_sequence(
            (dout,), distribution.group, head_ranges=(distribution.queries,)
        )
        received = _gathered([*unsaved.values()], distribution.group) if unsaved else []
        return full_dout, dict(zip(unsaved, received, strict=True))


def _gathered(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """All-gather [s, B, G, D] to [S, B, G, D] in one collective."""
    columns = Columns(tensors)
    send = columns.pack(tensors)
    received = send.new_empty((send.shape[0] * group.size(), *send.shape[1:]))
    dist.all_gather_into_tensor(received, send, group=group)
    return columns.unpack(received)
