"""The message of rank 0 to the others: changes of the cache, then a step, as a row of integers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Chunk


class Change(IntEnum):
    """A call of the cache."""

    NEW = 0
    RESERVE = 1
    RELEASE = 2
    FORGET = 3
    GROW = 4


@attrs.frozen
class CacheChange:
    """A change of the cache, which every rank makes alike."""

    kind: Change
    sequence: int = 0
    num_tokens: int = 0


@attrs.frozen
class Placed:
    """A chunk, and the data-parallel replica that computes it."""

    chunk: Chunk
    replica: int


@attrs.frozen
class Plan:
    """What all ranks do next."""

    changes: Sequence[CacheChange]
    placed: Sequence[Placed]

    def as_row(self) -> Tensor:
        """Return it as int64."""
        values: list[int] = [len(self.changes), len(self.placed)]
        for change in self.changes:
            values += (change.kind, change.sequence, change.num_tokens)
        for one in self.placed:
            chunk = one.chunk
            values += (chunk.sequence, chunk.start, chunk.num_logits, chunk.length)
            values += (one.replica, len(chunk.ids), *chunk.ids)
        return torch.tensor(values, dtype=torch.int64)

    @classmethod
    def of_row(cls, row: Tensor) -> Plan:
        """Return the plan of a row."""
        values = iter(row.tolist())
        num_changes, num_placed = next(values), next(values)
        changes = [
            CacheChange(Change(next(values)), next(values), next(values))
            for _ in range(num_changes)
        ]
        placed = []
        for _ in range(num_placed):
            sequence, start, num_logits, length, replica, count = (next(values) for _ in range(6))
            ids = [next(values) for _ in range(count)]
            chunk = Chunk(
                sequence=sequence, start=start, ids=ids, num_logits=num_logits, length=length
            )
            placed.append(Placed(chunk, replica))
        return cls(changes, placed)


def send_plan(plan: Plan | None) -> None:
    """Tell every rank what comes next, on rank 0; None: nothing does."""
    row = torch.empty(0, dtype=torch.int64) if plan is None else plan.as_row()
    dist.broadcast(torch.tensor([len(row)]), 0)
    if plan is not None:
        dist.broadcast(row, 0)


def received_plan() -> Plan | None:
    """Return what rank 0 says, on another rank."""
    size = torch.empty(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    if not (length := int(size)):
        return None
    row = torch.empty(length, dtype=torch.int64)
    dist.broadcast(row, 0)
    return Plan.of_row(row)


class RecordedCache(KeyValueCache):
    """The cache of rank 0: keeps each change until the next plan has it."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.changes = [CacheChange(Change.NEW, num_tokens=num_tokens)]

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Reserve pages; see the base class."""
        super().reserve(sequence, num_tokens)
        self.changes.append(CacheChange(Change.RESERVE, sequence, num_tokens))

    def release(self, sequence: int) -> None:
        """Free the pages of a sequence."""
        super().release(sequence)
        self.changes.append(CacheChange(Change.RELEASE, sequence))

    def forget(self, sequence: int, num_kept: int = 0) -> None:
        """Forget the tokens of a sequence after its first ones."""
        super().forget(sequence, num_kept)
        self.changes.append(CacheChange(Change.FORGET, sequence, num_kept))

    def grow(self, sequence: int, num_tokens: int) -> None:
        """Reserve more pages; see the base class."""
        super().grow(sequence, num_tokens)
        self.changes.append(CacheChange(Change.GROW, sequence, num_tokens))
