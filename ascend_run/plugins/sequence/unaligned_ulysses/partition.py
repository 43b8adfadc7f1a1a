"""Shards of a sequence of any length. No torch: ``plan`` shows them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs

from ascend_run.ops.attention.head_shares import parts
from ascend_run.plugin_api import ConfigError, RunConfig


@attrs.frozen(kw_only=True)
class UnevenParts:
    """Partition a sequence into contiguous shards, the first ones one unit longer.

    Implements contracts.UnevenPartition.
    """

    seq_length: int
    """Sequence length of the run. Batches of another length must shard evenly, which needs the
    length of the run to shard evenly too. Unit: positions."""
    unit: int = 1
    """The length of a shard is a multiple of this: under sequence parallelism, tensor-parallel
    ranks shard it again. Unit: positions."""
    rows: int = 1
    """Rows of a micro-batch. If every row has its own documents, a batch is all rows in one
    sequence."""
    multiple: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        parallel = config.parallel
        unit = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        rows = config.train.micro_batch_size
        return cls(seq_length=config.data.seq_length, unit=unit, rows=rows)

    @property
    def uneven(self) -> tuple[int, int]:
        """Lengths whose shards may differ: one row, and all rows in one sequence."""
        return self.seq_length, self.seq_length * self.rows

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        if seq_length not in self.uneven and seq_length % (size * self.unit):
            # A rank could not derive the sequence length from its own shard.
            raise ConfigError(
                f"unaligned-ulysses: a batch of {seq_length} positions in a run of "
                f"data.seq_length={self.seq_length} cannot be split into equal shards for {size} "
                f"ranks; give multiples of {size * self.unit}, or batches of data.seq_length"
            )
        start, stop = parts(seq_length // self.unit, size)[rank]
        return ((start * self.unit, stop * self.unit),)

    def lengths(self, size: int, seq_length: int | None = None) -> list[int]:
        """Return the length of each rank's shard, in positions.

        Args:
            seq_length: Length of the sequence; default: that of the run.
        """
        return [
            stop - start
            for rank in range(size)
            for start, stop in self.chunks(seq_length or self.seq_length, rank, size)
        ]

    def full_length(self, held: int, rank: int, size: int) -> int:
        """Return the full length of a sequence from the length of one rank's shard.

        Uneven shards do not determine the full length, so they must be those of the run.

        Raises:
            ConfigError: The shard is not one of the run's.
        """
        if len({*self.lengths(size)}) == 1:
            return held * size
        of_whole = {self.lengths(size, whole)[rank]: whole for whole in self.uneven}
        if held not in of_whole:
            expected = " or ".join(str(part) for part in sorted(of_whole))
            raise ConfigError(
                f"unaligned-ulysses: rank {rank} of {size} holds {held} positions of a sequence, "
                f"expected {expected} of data.seq_length={self.seq_length}; give batches of that "
                "length"
            )
        return of_whole[held]
