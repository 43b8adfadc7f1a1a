"""Which hard cases of data and model occurred on one rank, for the list of what was exercised."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(kw_only=True)
class Routing:
    """The tokens of one router on this rank, in one global batch."""

    tokens: list[int]
    """Expert -> number of tokens."""
    total: int = 0
    """Number of tokens."""
    ties: int = 0
    """Tokens whose last chosen score is equal to the best one that was not chosen."""
    below_zero: int | None = None
    """Tokens that chose an expert by a score below 0; None if no score is, or they may
    choose every expert."""


@attrs.define(kw_only=True)
class MicroBatch:
    """The rows of one micro-batch on this rank; with context parallelism, its part of them."""

    step: int
    trained: list[int]
    """Row -> number of trained tokens."""
    ends: list[list[int]]
    """Row -> position of its last trained token (-1 if there is none) and its last position."""
    documents: int
    """Number of documents; as many as rows, if none ends within a row."""
    length: int
    """Number of positions of a row on this rank."""


@attrs.define(kw_only=True)
class CaseRecord:
    """What occurred on one rank. Serializable as JSON."""

    routing: dict[str, Routing] = attrs.field(factory=dict)
    """Router -> its tokens."""
    micro_batches: list[MicroBatch] = attrs.field(factory=list)
    """Of the training steps, in order."""
    skipped: int = 0
    """Steps that were skipped because of infinite gradients."""
    offsets: int = 0
    """Inputs of modules at an offset of their storage, over all parts of the run."""

    @classmethod
    def of_data(cls, data: Any) -> CaseRecord:
        """Build the record from its JSON values."""
        return cls(
            routing={name: Routing(**seen) for name, seen in data["routing"].items()},
            micro_batches=[MicroBatch(**seen) for seen in data["micro_batches"]],
            skipped=data["skipped"],
            offsets=data["offsets"],
        )
