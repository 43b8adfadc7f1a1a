"""The way of rows to the ranks of their experts, and of their outputs back."""

# R rows sent, Q rows received, x experts of this rank that they are for, E expert-parallel ranks, P
# expert tensor-parallel ranks, H hidden size, C capacity of an expert

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from .token_copies import swap_chunks, transposed
from .token_exchange import AllToAll, Exchange, gather_rows, scatter_rows


@attrs.frozen(eq=False)
class ReceivedRows:
    """Numbers of the rows that experts of this rank get, on the host; int64."""

    sent_Ex: Tensor
    """From this rank to the experts at these places on each rank."""
    chunks_PEx: Tensor
    """From each rank to each of these experts, in the order in which they arrive."""
    tp_rank: int
    """This rank, among those of an expert's tensor parallelism."""

    def of(self, experts: slice) -> ReceivedRows:
        """Return those of some of the experts."""
        return ReceivedRows(self.sent_Ex[:, experts], self.chunks_PEx[:, :, experts], self.tp_rank)

    @property
    def sent(self) -> list[int]:
        """To each expert-parallel rank."""
        return self.sent_Ex.sum(dim=1).tolist()

    @property
    def received(self) -> list[int]:
        """From each expert-parallel rank."""
        return self.chunks_PEx[self.tp_rank].sum(dim=1).tolist()

    @property
    def gathered(self) -> list[int]:
        """Of each expert tensor-parallel rank, after the all-to-all."""
        return self.chunks_PEx.sum(dim=(1, 2)).tolist()

    @property
    def counts_x(self) -> Tensor:
        """Of each expert."""
        return self.chunks_PEx.sum(dim=(0, 1))


class RoundTrip:
    """One round trip, stage by stage.

    Args:
        wide: The dtype in which partial outputs of an expert are added.
        capacity: Rows of every expert from every rank; None if that differs.
        overlap: Wait for an all-to-all where its result is used, otherwise where it is issued.
    """

    def __init__(
        self,
        rows: ReceivedRows,
        ep_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup,
        *,
        wide: torch.dtype,
        capacity: int | None,
        overlap: bool,
    ) -> None:
        self.rows, self.ep_group, self.tp_group = rows, ep_group, tp_group
        self.wide, self.capacity, self.overlap = wide, capacity, overlap
        self.sent, self.received, self.gathered = rows.sent, rows.received, rows.gathered

    def send(self, rows_RH: Tensor, probs_R: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the ranks of their experts."""
        there = [self._exchange(self.sent, self.received) for _ in range(2)]
        self.under_way = there if self.overlap else [None, None]
        rows, probs = map(self._started, (rows_RH, probs_R), there)
        return rows, probs

    def arrive(self, rows_RH: Tensor, probs_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what arrives, sorted by expert [Q, H], the counts [x] and probabilities [Q]."""
        sizes_PEx = self._swapped_sizes()
        rows, probs = map(_finished, (rows_RH, probs_R), self.under_way)
        rows, probs = (self._gather(part) for part in (rows, probs))
        if sizes_PEx is not None:
            rows, probs = (swap_chunks(part, sizes_PEx) for part in (rows, probs))
        elif self.capacity is not None:
            sizes = (-1, self.rows.chunks_PEx.shape[2], self.capacity)
            rows, probs = (_swapped(part, *sizes) for part in (rows, probs))
        return rows, self.rows.counts_x, probs

    def leave(self, rows_QH: Tensor) -> Tensor:
        """Return the experts' outputs to the order in which their tokens arrived."""
        sizes_PEx = self._swapped_sizes()
        if sizes_PEx is not None:
            rows_QH = swap_chunks(rows_QH, transposed(sizes_PEx))
        elif self.capacity is not None:
            rows_QH = _swapped(rows_QH, self.rows.chunks_PEx.shape[2], -1, self.capacity)
        if self.tp_group.size() > 1:
            wide = rows_QH.to(self.wide)
            rows_QH = scatter_rows(wide, self.gathered, self.tp_group).to(rows_QH.dtype)
        return rows_QH

    def send_back(self, rows_QH: Tensor) -> Tensor:
        """Send the outputs to the ranks that their tokens came from."""
        back = self._exchange(self.received, self.sent)
        self.under_way = [back if self.overlap else None]
        return self._started(rows_QH, back)

    def come_back(self, rows_RH: Tensor) -> Tensor:
        """Return the outputs [R, H], in the order in which their tokens were sent."""
        rows_RH, self.under_way = _finished(rows_RH, *self.under_way), []
        return rows_RH

    def _exchange(self, there: list[int], here: list[int]) -> Exchange | None:
        """Return an all-to-all; None if all of the experts are here."""
        return None if self.ep_group.size() == 1 else AllToAll(self.ep_group, there, here)

    def _started(self, rows: Tensor, exchange: Exchange | None) -> Tensor:
        if exchange is None:
            return rows
        started = exchange.start(rows)
        return started if self.overlap else exchange.finish(started)

    def _gather(self, rows: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return rows
        return gather_rows(rows, self.gathered, self.tp_group)

    def _swapped_sizes(self) -> list[list[int]] | None:
        """Return the rows from each rank (in the order of arrival) to each expert, by which they
        are sorted by expert; None with one expert, or with as many rows from each rank to each."""
        chunks_PEx = self.rows.chunks_PEx
        if chunks_PEx.shape[2] == 1 or self.capacity is not None:
            return None
        sizes_PEx: list[list[int]] = chunks_PEx.flatten(0, 1).tolist()
        return sizes_PEx


def _finished(rows: Tensor, exchange: Exchange | None) -> Tensor:
    return rows if exchange is None else exchange.finish(rows)


def _swapped(rows: Tensor, outer: int, inner: int, capacity: int) -> Tensor:
    """Return [outer * inner * C, ...] as [inner * outer * C, ...]; one of them may be -1."""
    if capacity == 0:
        return rows
    out: Tensor = rows.unflatten(0, (outer, inner, capacity)).transpose(0, 1).flatten(0, 2)
    return out
