"""The record of a run of training on one rank, and its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.define(kw_only=True)
class RunState:
    """What one rank holds."""

    tensors: Mapping[str, Tensor]
    """Key and offset -> shard: weights, optimizer state, random generators, entries of plugins;
    also parameters and buffers that no checkpoint has."""
    values: Mapping[str, Any]
    """The same for what is no tensor, by entry: steps and samples, schedule, loss scale."""
    attributes: Mapping[str, str]
    """``plugin.attribute`` -> its number or text, for plugin instances."""


@attrs.define(kw_only=True)
class TrainedStep:
    """What one step read and computed."""

    rows: Sequence[str]
    """Hash of each row of this rank's micro-batches, in order."""
    loss: float
    grad_norm: float | None


@attrs.define(kw_only=True)
class TrainingRecord:
    """What one rank recorded of a run of training."""

    rank: int
    first_step: int
    """Step of the checkpoint that the run was resumed from; 0 without one."""
    start: RunState
    """After a checkpoint was restored."""
    steps: Mapping[int, TrainedStep]
    end: RunState


def write_training_record(record: TrainingRecord, folder: Path) -> None:
    """Write a file named after the rank."""
    torch.save(attrs.asdict(record), folder / f"rank-{record.rank}.pt")


def read_training_records(folder: Path, world_size: int) -> list[TrainingRecord]:
    """Read all records, by rank."""
    return [_read(folder / f"rank-{rank}.pt") for rank in range(world_size)]


def _read(file: Path) -> TrainingRecord:
    data: dict[str, Any] = torch.load(file, weights_only=True)
    return TrainingRecord(
        rank=data["rank"],
        first_step=data["first_step"],
        start=RunState(**data["start"]),
        steps={number: TrainedStep(**step) for number, step in data["steps"].items()},
        end=RunState(**data["end"]),
    )
