"""The order of forwards and backwards in Megatron's interleaved schedule. No torch."""

from __future__ import annotations

from functools import cached_property

import attrs


@attrs.frozen
class ScheduleOrder:
    """Forwards and backwards of one rank in one step, each numbered in its own order.

    After ``warm_up`` forwards, one forward and one backward alternate; the rest are backwards. The
    time is counted in backwards: step t ends with backward t.
    """

    pipeline: int  #: Ranks of the pipeline.
    rank: int
    chunks: int  #: Of this rank.
    group: int  #: Micro-batches that a chunk takes in a row.
    microbatches: int  #: Of a step.

    @cached_property
    def forwards(self) -> tuple[tuple[int, int], ...]:
        """(chunk, micro-batch) of each forward."""
        return tuple(
            (chunk, microbatch)
            for start in range(0, self.microbatches, self.group)
            for chunk in range(self.chunks)
            for microbatch in range(start, min(start + self.group, self.microbatches))
        )

    @cached_property
    def backwards(self) -> tuple[tuple[int, int], ...]:
        """(chunk, micro-batch) of each backward: the same, with the last chunk first."""
        return tuple((self.chunks - 1 - chunk, number) for chunk, number in self.forwards)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Forward -> its backward."""
        numbers = {step: number for number, step in enumerate(self.backwards)}
        return tuple(numbers[step] for step in self.forwards)

    @property
    def warm_up(self) -> int:
        """Forwards before the first backward's own."""
        ahead = (self.pipeline - self.rank - 1) * 2 + (self.chunks - 1) * self.group
        return min(len(self.forwards), ahead)

    def begin(self, forward: int) -> int:
        """Return the step in which a forward runs; those of the warm-up run before step 0."""
        return max(0, forward - self.warm_up)

    def waits(self, backward: int) -> bool:
        """Return whether a backward's gradient comes from another rank: the output of the last
        chunk on the last rank is the loss."""
        is_last_rank = self.rank == self.pipeline - 1
        return not (is_last_rank and self.backwards[backward][0] == self.chunks - 1)
