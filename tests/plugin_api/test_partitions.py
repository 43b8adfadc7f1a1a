"""How long the sequence is of which a rank holds a part."""

from __future__ import annotations

from ascend_run.plugin_api import SequencePartition, UnevenPartition, full_length


class Even:
    multiple = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        part = seq_length // size
        return [(rank * part, (rank + 1) * part)]


class LastHasTheRest(Even):
    multiple = 0

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        ((start, stop),) = super().chunks(seq_length, rank, size)
        return [(start, seq_length if rank == size - 1 else stop)]

    def full_length(self, held: int, rank: int, size: int) -> int:
        return 11


def test_only_a_declared_uneven_partition_has_unequal_shards() -> None:
    even: SequencePartition = Even()
    uneven: UnevenPartition = LastHasTheRest()
    assert full_length(even, 3, 1, 4) == 12
    assert full_length(uneven, 3, 1, 3) == 11
    assert full_length(uneven, 5, 0, 1) == 5, "one rank holds it all"
    assert full_length(None, 5, 0, 1) == 5
