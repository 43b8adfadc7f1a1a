"""What plugins say of checkpoints: where they go, what is in them, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.core.checkpoint.store import FileStore, layout_sizes
from ascend_run.plugin_api import CheckpointError, HookError, Layout
from ascend_run.testing.pool import GlooPool
from tests.support.probed_runs import Run, probe, train
from tests.support.tokens import write_tokens

from .jobs import train_with_entries


def go_on(folder: Path, steps: int, *probes: Any) -> Run:
    """Train up to a step, from where the folder's checkpoints stand."""
    values = {
        "train.train_iters": steps,
        "checkpoint.save_interval": 1,
        "optimizer.lr_decay_style": "constant",  # the decay is over the steps of one run
    }
    return train(folder, *probes, values=values)


class Shelf:
    """contracts.CheckpointStore in memory, of one rank."""

    def __init__(self) -> None:
        self.saved: dict[int, tuple[dict[str, torch.Tensor], Mapping[str, Any]]] = {}
        self.loaded: list[int] = []

    def steps(self) -> Sequence[int]:
        return sorted(self.saved)

    def save(self, step: int, shards: Sequence[Any], values: Mapping[str, Any]) -> str:
        tensors = {f"{p.key}{p.offset}": p.tensor.clone() for p in shards}
        self.saved[step] = (tensors, values)
        return f"shelf/{step}"

    def verify(self, step: int) -> None:
        if step not in self.saved:
            raise CheckpointError(f"no step {step}")

    def layout(self, step: int) -> Mapping[str, int]:
        return layout_sizes(Layout())

    def load(
        self, step: int, shards: Sequence[Any], *, ignore_unused: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        tensors, values = self.saved[step]
        for shard in shards:
            shard.tensor.copy_(tensors[f"{shard.key}{shard.offset}"])
        self.loaded.append(step)
        return values


def test_ascend_checkpoint_transfer_may_stand_in_the_place_of_the_store(tmp_path: Path) -> None:
    shelf = Shelf()
    on_the_shelf = probe("ascend_checkpoint_transfer", lambda self: lambda inner: shelf)
    go_on(tmp_path / "resumed", 2, on_the_shelf)
    assert shelf.steps() == [1, 2]
    resumed = go_on(tmp_path / "resumed", 3, on_the_shelf)
    assert shelf.loaded == [2]
    assert not (tmp_path / "resumed/run/checkpoints").exists()
    through = go_on(tmp_path / "through", 3).weights
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in through.items())


def test_ascend_checkpoint_transfer_stands_between_the_run_and_its_store(tmp_path: Path) -> None:
    passed: list[tuple[str, str, int]] = []

    class Passing:
        """contracts.CheckpointStore: the store inside, and a note of what passes."""

        def __init__(self, inner: Any, name: str) -> None:
            self.inner, self.name = inner, name

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def save(self, step: int, shards: Sequence[Any], values: Mapping[str, Any]) -> str:
            passed.append((self.name, "save", step))
            return str(self.inner.save(step, shards, values))

        def load(self, step: int, shards: Sequence[Any], **options: Any) -> Mapping[str, Any]:
            passed.append((self.name, "load", step))
            values: Mapping[str, Any] = self.inner.load(step, shards, **options)
            return values

    def of(name: str) -> Any:
        def wrap(self: Any, context: Any) -> Any:
            assert context.layout.world_size == 1
            return lambda inner: Passing(inner, name)

        return probe("ascend_checkpoint_transfer", wrap, name)

    probes = (of("inner"), of("outer"))
    go_on(tmp_path, 1, *probes)
    assert passed == [("outer", "save", 1), ("inner", "save", 1)]
    assert FileStore(tmp_path / "run/checkpoints").steps() == [1]
    go_on(tmp_path, 2, *probes)
    assert passed[2:4] == [("outer", "load", 1), ("inner", "load", 1)]


def test_ascend_checkpoint_filter_excludes_shards_from_save_and_load(
    tmp_path: Path,
) -> None:
    started_from: list[torch.Tensor] = []

    def without_embedding(self: Any, role: str) -> Any:
        assert role == "policy"
        return lambda shards: [shard for shard in shards if "word_embeddings" not in shard.key]

    def look(self: Any, context: Any) -> None:
        model = context.models["policy"].chunks[0].module
        started_from.append(model.embedding.word_embeddings.weight.detach().clone())

    probes = (
        probe("ascend_checkpoint_filter", without_embedding, "filter"),
        probe("ascend_before_run", look, "look"),
    )
    first = go_on(tmp_path, 1, *probes)
    stored = FileStore(tmp_path / "run/checkpoints").manifest(1).tensors
    models = [key for key in stored if key.startswith("model/")]
    assert not [key for key in models if "word_embeddings" in key]
    assert len(models) == len(first.weights) - 1

    go_on(tmp_path, 2, *probes)
    assert torch.equal(*started_from)  # not restored, so as it was first initialised


class Counter:
    """contracts.CheckpointEntry: a number and a tensor."""

    def __init__(self) -> None:
        self.number, self.tensor = 0, torch.zeros(3)

    def state_dict(self) -> Mapping[str, Any]:
        return {"number": self.number, "tensor": self.tensor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number, self.tensor = state["number"], state["tensor"]


def counting(counter: Counter) -> tuple[Any, Any]:
    """Plugins that keep the counter and count steps with it."""

    def count(self: Any) -> None:
        counter.number += 1
        counter.tensor = counter.tensor + 0.5

    def entries(self: Any, context: Any) -> Mapping[str, Counter]:
        return {"counter": counter}

    return (
        probe("ascend_checkpoint_entries", entries, "keeper"),
        probe("ascend_after_step", count, "counter"),
    )


def test_ascend_checkpoint_entries_are_restored_on_resume(tmp_path: Path) -> None:
    first, second = Counter(), Counter()
    go_on(tmp_path, 2, *counting(first))
    assert first.number == 2
    go_on(tmp_path, 3, *counting(second))
    assert second.number == 3
    assert second.tensor.tolist() == [1.5] * 3


def test_ascend_checkpoint_entries_missing_in_the_checkpoint_are_errors(
    tmp_path: Path,
) -> None:
    go_on(tmp_path, 1)
    with pytest.raises(CheckpointError, match="counter"):
        go_on(tmp_path, 2, *counting(Counter()))


def recorded_events(tmp_path: Path) -> list[str | None]:
    """Return what each line of the run's metrics is: the name of its event, or None for a step."""
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get("event") for line in lines]


@pytest.mark.parametrize("name", ["progress", "rng", "model", "optimizer.reward", "a/b", ""])
def test_ascend_checkpoint_entries_may_not_take_a_name_of_the_kernels(
    tmp_path: Path, name: str
) -> None:
    taker = probe("ascend_checkpoint_entries", lambda self: {name: Counter()}, "taker")
    with pytest.raises(HookError, match=f"'{name}'"):
        go_on(tmp_path, 1, taker)
    assert recorded_events(tmp_path) == ["failure"]  # refused before the first step


def test_ascend_checkpoint_entries_of_one_name_are_rejected(
    tmp_path: Path,
) -> None:
    """The error is raised before the first step."""
    takers = [
        probe("ascend_checkpoint_entries", lambda self: {"counter": Counter()}, name)
        for name in ("one", "other")
    ]
    with pytest.raises(HookError, match="'one' and 'other' both give 'counter'"):
        train(tmp_path, *takers)
    assert recorded_events(tmp_path) == ["failure"]


def test_ascend_checkpoint_entries_of_a_rank_begin_anew_on_other_ranks(
    tmp_path: Path, gloo_pool: GlooPool
) -> None:
    """And those of the whole run are resharded."""
    write_tokens(tmp_path)
    empty = [-1.0, -1.0]
    first = gloo_pool.run(train_with_entries, 2, str(tmp_path), 1, timeout=100)
    assert [rank["halves"] for rank in first] == [(empty, empty, -1)] * 2
    again = gloo_pool.run(train_with_entries, 2, str(tmp_path), 2, timeout=100)
    assert [rank["halves"] for rank in again] == [
        ([0.0, 0.0], [0.0, 1.0], 1),
        ([1.0, 1.0], [2.0, 3.0], 1),
    ]
    (alone,) = gloo_pool.run(train_with_entries, 1, str(tmp_path), 3, timeout=100)
    assert alone == {
        "halves": (empty, [-1.0] * 4, -1),
        "shared": (empty, [0.0, 1.0, 2.0, 3.0], 2),
    }
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    (told,) = [line for line in map(json.loads, lines) if line["event"].endswith("other_layout")]
    assert told["begun_anew"] == ["halves", "rng"]


def test_ascend_machine_choices_that_differ_are_reported_on_resume(tmp_path: Path) -> None:
    """With both values and the option; the run goes on."""

    def choosing(value: str) -> Any:
        return probe("ascend_machine_choices", lambda self: {"plugins.probe.products": value})

    for steps, value in enumerate(("narrow", "narrow", "wide", "wide"), start=1):
        go_on(tmp_path, steps, choosing(value))
        environment = json.loads((tmp_path / "run/environment.json").read_text())
        assert environment["machine_choices"]["plugins.probe.products"] == value
    go_on(tmp_path, 5)  # an option that no longer counts
    go_on(tmp_path, 6, choosing("wide"))  # one that the checkpoint does not know

    lines = map(json.loads, (tmp_path / "run/log.jsonl").read_text().splitlines())
    events = [line for line in lines if line["event"] == "checkpoint.other_machine_choice"]
    changed, unrecorded = events
    assert changed["level"] == "warning"
    assert (unrecorded["saved"], unrecorded["now"]) == ("unknown", "wide")
    assert (changed["option"], changed["saved"], changed["now"]) == (
        "plugins.probe.products",
        "narrow",
        "wide",
    )
    assert "set plugins.probe.products=narrow" in changed["fix"]
