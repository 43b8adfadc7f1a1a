"""Rotary position tables for the positions that this rank holds.

Source: arXiv:2104.09864; half-rotation pairing as in GPT-NeoX and Llama, or interleaved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ascend_run.ops.elementwise.rotary_scaling import RotaryScaling, frequencies
from ascend_run.plugin_api import contracts as c

# S sequence on this rank, R rotary dim (rotary_percent of the head size)


class RotaryTable(nn.Module):
    """Cosines and sines, sharded like the sequence.

    Args:
        width: R, the number of rotated entries of a head; even.
        base: The angle of pair i at position p is ``p * base ** (-2 i / R)``.
        scaling: RoPE scaling, or None.
        partition: Sequence sharding, or None.
        cp_rank, cp_size: Context-parallel rank and size.
        row_length: Upper bound of the length used by length-dependent scaling if the sequence holds
            documents: packing concatenates the rows of a micro-batch to longer sequences.
    """

    def __init__(
        self,
        width: int,
        base: float,
        *,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
        partition: c.SequencePartition | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        row_length: int | None = None,
    ) -> None:
        super().__init__()
        self.width, self.base, self.interleaved = width, base, interleaved
        self.scaling = scaling
        self.partition, self.cp_rank, self.cp_size = partition, cp_rank, cp_size
        self.row_length = row_length
        self._cache: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}
        self._full_tables: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    def positions(self, seq_length: int, document_ends: tuple[int, ...] | None = None) -> Tensor:
        """Return the global positions of this rank's tokens in local order: ``[S]``, int64."""
        if self.partition is None or self.cp_size == 1:
            return torch.arange(seq_length)
        partition = c.partition_of(self.partition, document_ends)
        chunks = partition.chunks(seq_length, self.cp_rank, self.cp_size)
        return torch.cat([torch.arange(start, stop) for start, stop in chunks])

    def forward(
        self,
        seq_length: int,
        dtype: torch.dtype,
        device: torch.device,
        document_ends: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return cosines and sines, [2, S, R]; angles are computed in float64 and rounded once.

        Args:
            seq_length: Length of the full sequence, over all context-parallel ranks.
            document_ends: Document ends of this batch, on which the sharding may depend.
        """
        counted = seq_length
        if document_ends and self.row_length is not None:
            counted = min(seq_length, self.row_length)
        key = (seq_length, counted, dtype, device)
        if self.partition is not None and self.cp_size > 1 and document_ends:
            # Documents differ in every batch: cache the full table and select from it.
            if key not in self._full_tables:
                tables = self.at(torch.arange(seq_length), counted)
                self._full_tables[key] = tables.to(device=device, dtype=dtype)
            positions = self.positions(seq_length, document_ends).to(device)
            return self._full_tables[key].index_select(1, positions)
        if key not in self._cache:
            tables = self.at(self.positions(seq_length), counted)
            self._cache[key] = tables.to(device=device, dtype=dtype)
        return self._cache[key]

    def at(self, positions_S: Tensor, seq_length: int) -> Tensor:
        """Return the tables of any positions in a text of that length: [2, S, R], float64.

        Nothing is kept, so each call may be of another length.
        """
        width, base, scaling = self.width, self.base, self.scaling
        if scaling is None:
            angle_P, magnitude = frequencies(width, base), 1.0
        else:
            angle_P = scaling.frequencies(width, base, seq_length)
            magnitude = scaling.magnitude(seq_length)
        angles_SP = torch.outer(positions_S.double(), angle_P)
        angles_SR = (
            angles_SP.repeat_interleave(2, dim=-1)
            if self.interleaved
            else torch.cat((angles_SP, angles_SP), dim=-1)
        )
        return torch.stack((angles_SR.cos(), angles_SR.sin())) * magnitude


class RotaryTables(nn.Module):
    """The tables of layers without and of layers with a window, stacked: [2, 2, S, R].

    Args:
        tables: For those without, then for those with a window.
    """

    def __init__(self, *tables: RotaryTable) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, *args: Any) -> Tensor:
        """Return the tables; arguments as those of RotaryTable."""
        return torch.stack([table(*args) for table in self.tables])

    def at(self, positions_S: Tensor, seq_length: int) -> Tensor:
        """Return the tables of any positions: [2, 2, S, R], float64."""
        tables = cast("Iterable[RotaryTable]", self.tables)
        return torch.stack([table.at(positions_S, seq_length) for table in tables])
