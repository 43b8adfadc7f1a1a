"""Who holds which part of a sequence of any length. No torch: ``plan`` shows it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs

from ascend_run.ops.attention.head_shares import parts
from ascend_run.plugin_api import ConfigError, RunConfig


@attrs.frozen(kw_only=True)
class UnevenParts:
    """Consecutive parts, the first ones one unit longer: contracts.UnevenPartition."""

    seq_length: int
    """Of a batch of the run; where ranks hold equal parts of it, others may be shorter, of equal
    parts too. Unit: positions."""
    unit: int = 1
    """A rank's part is a multiple of it: the tensor-parallel ranks cut it again under sequence
    parallelism. Unit: positions."""
    rows: int = 1
    """Of a micro-batch; where each has documents of its own, a batch is all of them in one
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
        """The lengths whose parts may differ: of a row, and of all rows in one sequence."""
        return self.seq_length, self.seq_length * self.rows

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        if seq_length not in self.uneven and seq_length % (size * self.unit):
            # No rank could tell by its own part how long the sequence is.
            raise ConfigError(
                f"unaligned-ulysses: a batch of {seq_length} positions in a run of "
                f"data.seq_length={self.seq_length} cannot be cut into equal parts for {size} "
                f"ranks; give multiples of {size * self.unit}, or batches of data.seq_length"
            )
        start, stop = parts(seq_length // self.unit, size)[rank]
        return ((start * self.unit, stop * self.unit),)

    def lengths(self, size: int, seq_length: int | None = None) -> list[int]:
        """What each rank holds of a sequence; default: of one of the run."""
        return [
            stop - start
            for rank in range(size)
            for start, stop in self.chunks(seq_length or self.seq_length, rank, size)
        ]

    def whole_length(self, held: int, rank: int, size: int) -> int:
        """Equal parts tell it; uneven ones are the run's, since nothing tells how long another
        sequence is by its part.

        Raises:
            ConfigError: The part is of another length.
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
