"""Who holds which part of a sequence. No torch: ``plan`` shows it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs


@attrs.frozen
class ZigZag:
    """Rank r of P holds chunks r and 2P - 1 - r of 2P: contracts.SequencePartition.

    Under a causal mask an early chunk sees few keys and a late one many; their sum is the same for
    every rank.
    """

    multiple: int = 2

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        part = seq_length // (2 * size)
        late = 2 * size - 1 - rank
        return ((rank * part, (rank + 1) * part), (late * part, (late + 1) * part))


@attrs.frozen
class Contiguous:
    """Rank r of P holds the r-th P-th part: contracts.SequencePartition."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        part = seq_length // size
        return ((rank * part, (rank + 1) * part),)


PARTITIONS: Final[Mapping[str, ZigZag | Contiguous]] = {
    "zig-zag": ZigZag(),
    "contiguous": Contiguous(),
}
