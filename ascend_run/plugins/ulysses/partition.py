"""Who holds which part of a sequence. No torch: ``plan`` shows it too."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class ContiguousPartition:
    """Rank r of P holds the r-th P-th part: contracts.SequencePartition."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        part = seq_length // size
        return ((rank * part, (rank + 1) * part),)
