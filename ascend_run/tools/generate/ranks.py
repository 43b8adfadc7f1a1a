"""Steps on several ranks: rank 0 has the engine, and sends each step to the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.types.layout import Layout

from .plan_message import (
    CacheChange,
    Change,
    Placed,
    Plan,
    RecordedCache,
    received_plan,
    send_plan,
)
from .stage import Stage

# R rows whose logits are wanted, V vocabulary


class Leader:
    """Rank 0: every rank computes the steps that it is asked for.

    A sequence is computed by one data-parallel replica, that with the fewest reserved tokens when
    it is admitted. Each replica reserves the pages of all sequences, so that one list of changes
    goes to all; pages that it never writes take no memory.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cache: RecordedCache | None = None
        self._reserved: dict[int, tuple[int, int]] = {}  # Sequence -> its replica and tokens.

    def with_cache(self, num_tokens: int) -> KeyValueCache:
        """Give every rank a new cache."""
        self._cache = self._stage.forward.cache = RecordedCache(num_tokens)
        return self._cache

    def logits(self, step: Step) -> Tensor:
        """Compute a step: the logits [R, V] of its wanted rows."""
        assert self._cache is not None
        changes, self._cache.changes = self._cache.changes, []
        for change in changes:
            self._place(change)
        placed = [Placed(chunk, self._reserved[chunk.sequence][0]) for chunk in _chunks(step)]
        plan = Plan(changes, placed)
        send_plan(plan)
        own = _computed(self._stage, plan)
        rows = {
            replica: self._received(replica, count, own)
            for replica, count in _num_rows(plan).items()
        }
        return _in_order(plan, rows) if rows else torch.empty(0, self._width)

    @property
    def _width(self) -> int:
        width: int = self._stage.context.config.model.vocab_size
        return width

    def _received(self, replica: int, count: int, own: Tensor | None) -> Tensor:
        sender = _last_rank(self._stage.context.layout, replica)
        if sender == 0:
            assert own is not None
            return own
        dtype = self._stage.bundle.transformer_config.params_dtype
        logits_RV = torch.empty(count, self._width, dtype=dtype)
        dist.recv(logits_RV, sender)
        return logits_RV

    def _place(self, change: CacheChange) -> None:
        if change.kind is Change.NEW:
            self._reserved.clear()
        elif change.kind is Change.RESERVE:
            tokens = [0] * self._stage.context.layout.dp
            for replica, count in self._reserved.values():
                tokens[replica] += count
            fewest = tokens.index(min(tokens))
            self._reserved[change.sequence] = (fewest, change.num_tokens)
        elif change.kind is Change.GROW:
            replica, count = self._reserved[change.sequence]
            self._reserved[change.sequence] = (replica, max(count, change.num_tokens))
        elif change.kind is Change.RELEASE:
            del self._reserved[change.sequence]


def follow(stage: Stage) -> None:
    """Compute what rank 0 asks for, on another rank, until it asks for nothing more."""
    layout = stage.context.layout
    replica = layout.coordinate("dp")
    while (plan := received_plan()) is not None:
        for change in plan.changes:
            _change(stage, change)
        logits = _computed(stage, plan)
        if _num_rows(plan)[replica] and layout.rank == _last_rank(layout, replica):
            assert logits is not None
            dist.send(logits.contiguous(), 0)


def _computed(stage: Stage, plan: Plan) -> Tensor | None:
    """Compute this replica's part of a step. Without tokens it computes one that belongs to no
    sequence, since the exchange of tokens with experts is of all replicas."""
    replica = stage.context.layout.coordinate("dp")
    mine = [one.chunk for one in plan.placed if one.replica == replica]
    if mine:
        return stage.logits(Step.of(mine))
    nothing = torch.zeros(1, dtype=torch.int64)
    return stage.logits(Step(nothing, nothing, (), nothing[:0]))


def _change(stage: Stage, change: CacheChange) -> None:
    if change.kind is Change.NEW:
        stage.forward.cache = KeyValueCache(change.num_tokens)
        return
    cache = stage.forward.cache
    assert cache is not None
    if change.kind is Change.RESERVE:
        cache.reserve(change.sequence, change.num_tokens)
    elif change.kind is Change.RELEASE:
        cache.release(change.sequence)
    elif change.kind is Change.GROW:
        cache.grow(change.sequence, change.num_tokens)
    else:
        cache.forget(change.sequence, change.num_tokens)


def _chunks(step: Step) -> Iterator[Chunk]:
    """Return what a step was made of."""
    rows = step.rows_R.tolist()
    for part in step.parts:
        wanted = sum(part.first <= row < part.first + part.count for row in rows)
        ids = step.tokens_T[part.rows].tolist()
        yield Chunk(
            sequence=part.sequence,
            start=part.start,
            ids=ids,
            num_logits=wanted,
            length=part.length,
        )


def _num_rows(plan: Plan) -> Counter[int]:
    """Replica -> logits that it computes, of those that compute any."""
    found: Counter[int] = Counter()
    for one in plan.placed:
        if one.chunk.num_logits:
            found[one.replica] += one.chunk.num_logits
    return found


def _in_order(plan: Plan, rows: dict[int, Tensor]) -> Tensor:
    """Order the logits of the replicas as those of the step: [R, V]."""
    taken: defaultdict[int, int] = defaultdict(int)
    ordered = []
    for one in plan.placed:
        if count := one.chunk.num_logits:
            first = taken[one.replica]
            ordered.append(rows[one.replica][first : first + count])
            taken[one.replica] = first + count
    return torch.cat(ordered)


def _last_rank(layout: Layout, replica: int) -> int:
    """Return the rank that sends a replica's logits: the first of its last stage."""
    place = {"tp": 0, "dp": replica, "pp": layout.pp - 1}
    return next(
        rank
        for rank in range(layout.world_size)
        if all(layout.coordinate(axis, rank) == index for axis, index in place.items())
    )
