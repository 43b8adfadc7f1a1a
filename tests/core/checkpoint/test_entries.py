"""Progress, random generators and plugins' own state: back exactly as they were."""

from __future__ import annotations

import random
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.checkpoint.entries import (
    DeviceGenerator,
    EntryShards,
    Progress,
    RandomState,
    SavedProgress,
)
from ascend_run.plugin_api import CheckpointError

from .thread_ranks import ThreadRanks, all_ranks


class Tracker:
    """As Megatron's: a state by name."""

    def __init__(self, **states: Tensor) -> None:
        self.states = dict(states)

    def get_states(self) -> dict[str, Tensor]:
        return self.states

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states


def draw_everything(device: torch.Generator) -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(),
        np.random.random(),
        torch.rand(()).item(),
        torch.rand((), generator=device).item(),
    ]


@pytest.mark.parametrize("spare", [False, True], ids=["no spare normal", "a spare normal"])
def test_every_generator_draws_on_where_it_was(tmp_path: Path, spare: bool) -> None:
    device = torch.Generator().manual_seed(5)
    generator = DeviceGenerator(device.get_state, device.set_state)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if spare:  # both generators draw normals in pairs and keep the second one
        random.gauss(0, 1)
        np.random.standard_normal()
    tracker = Tracker(experts=torch.arange(16, dtype=torch.uint8))
    entries = EntryShards({"rng": RandomState(generator, tracker)}, 0)
    FileStore(tmp_path).save(1, entries.shards, entries.values)
    want = draw_everything(device)

    other_tracker = Tracker(experts=torch.zeros(16, dtype=torch.uint8))
    entries = EntryShards({"rng": RandomState(generator, other_tracker)}, 0)
    entries.restore(FileStore(tmp_path).load(1, entries.shards))
    assert draw_everything(device) == want
    assert torch.equal(other_tracker.states["experts"], tracker.states["experts"])


class Counter:
    """A plugin's entry with tensors and values of both kinds."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"seen": torch.tensor([rank, 10]), "names": ["a"], "total": 3}
        self.loaded: Mapping[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


def test_each_rank_gets_its_own_tensors_back_and_all_the_same_values(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> None:
        entries = EntryShards({"counter": Counter(ranks.rank)}, ranks.rank)
        FileStore(tmp_path, ranks=ranks).save(1, entries.shards, entries.values)

    def load(ranks: ThreadRanks) -> Mapping[str, Any]:
        counter = Counter(7)
        entries = EntryShards({"counter": counter}, ranks.rank)
        entries.restore(FileStore(tmp_path, ranks=ranks).load(1, entries.shards))
        assert counter.state["seen"].tolist() == [7, 10], "loading must not reach into the entry"
        return counter.loaded

    all_ranks(2, save)
    for rank, loaded in enumerate(all_ranks(2, load)):
        assert loaded["seen"].tolist() == [rank, 10]
        assert (loaded["names"], loaded["total"]) == (["a"], 3)


def test_an_entry_that_the_checkpoint_lacks_is_named() -> None:
    entries = EntryShards({"new": Counter(0), "old": Counter(0)}, 0)
    with pytest.raises(CheckpointError, match="new: the checkpoint does not have it"):
        entries.restore({"old": {}})


class Scaler:
    """As Megatron's dynamic one."""

    def __init__(self, scale: float, tracker: int) -> None:
        self.scale, self.tracker = torch.tensor([scale]), tracker

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tracker = state["scale"], state["growth_tracker"]


class Schedule:
    """As Megatron's: a count of steps and what follows from it."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment


def run_at(step: int, scalers: list[Scaler]) -> Progress:
    context = types.SimpleNamespace(step=step, consumed_samples=8 * step)
    parts = [types.SimpleNamespace(grad_scaler=scaler) for scaler in scalers]
    optimizer = types.SimpleNamespace(chained_optimizers=parts)
    schedule = Schedule()
    schedule.step(step)
    bundle: Any = types.SimpleNamespace(optimizer=optimizer, scheduler=schedule)
    return Progress(context, {"policy": bundle})


def test_progress_comes_back_with_the_schedule_and_the_loss_scales(tmp_path: Path) -> None:
    entries = EntryShards({"progress": run_at(40, [Scaler(2.0**14, 3), Scaler(2.0**9, 5)])}, 0)
    FileStore(tmp_path).save(40, entries.shards, entries.values)
    scalers = [Scaler(1.0, 0), Scaler(1.0, 0)]
    resumed = run_at(0, scalers)
    entries = EntryShards({"progress": resumed}, 0)
    entries.restore(FileStore(tmp_path).load(40, entries.shards))
    state = resumed.state_dict()
    assert (state["step"], state["consumed_samples"], state["schedule_steps"]) == (40, 320, 40)
    assert [(s.scale.tolist(), s.tracker) for s in scalers] == [([2.0**14], 3), ([2.0**9], 5)]


def test_a_run_without_the_loss_scale_that_was_saved_is_refused() -> None:
    saved = run_at(3, [Scaler(2.0, 0)]).state_dict()
    with pytest.raises(CheckpointError, match="has 1 loss scales, this run 0; "):
        run_at(0, []).load_state_dict(saved)


def test_saved_progress_of_an_older_or_newer_version_is_read() -> None:
    older = {"step": 3, "consumed_samples": 24, "schedule_steps": 3, "loss_scalers": []}
    read = SavedProgress.read({**older, "of_a_later_version": 1})
    assert (read.step, read.went_back_to, read.machine_choices) == (3, None, {})
