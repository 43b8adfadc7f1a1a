"""What the pool's ranks do for the hooks that need more than one of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from ascend_run.core.data.batches import BatchPlan
from ascend_run.core.train.batches import BatchReader
from ascend_run.plugin_api.contracts import TensorShard
from ascend_run.testing.models import DENSE, samples
from ascend_run.types.config import FieldSection
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import built, built_from, prepare, probe, request, train

SMALLEST: Final = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 8,
}


def _take_place() -> None:
    """The variables of a launcher; the pool puts the environment back."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)


def own_groups(folder: str) -> dict[str, list[int]]:
    """The groups that a plugin planned and that this rank finds: name -> ranks."""
    _take_place()

    def plan(self: Any, layout: Any) -> Any:
        assert layout.world_size == 2
        return {"last": [[1]], "each": [[0], [1]], "both": [[0, 1]]}

    values = {"train.global_batch_size": 2}
    with built(Path(folder), probe("ascend_process_groups", plan), values=values) as (_, context):
        return {
            name: dist.get_process_group_ranks(getattr(context.groups, name))
            for name in ("both", "each", "last")
            if hasattr(context.groups, name)
        }


class Backwards:
    """contracts.SequencePartition: the last rank holds the first part."""

    multiple = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        part, place = seq_length // size, size - 1 - rank
        return [(place * part, (place + 1) * part)]


def cut_backwards(folder: str) -> dict[str, list[int]]:
    """Positions that this rank holds, by batch and by rotary table."""
    _take_place()
    before: list[list[int]] = []

    def look(self: Any) -> Any:
        def wrap(batches: Any) -> Any:
            for batch in batches:
                before.append(batch.tensors["position_ids"][0].tolist())
                yield batch

        return wrap

    partition = plugin(
        "backwards",
        {"ascend_sequence_partition": lambda self: Backwards(), "ascend_batch": look},
    )()
    asked = request(prepare(Path(folder), {"train.global_batch_size": 2}), partition)
    # Set here: preparing such a run takes an installed owner of the exchange.
    parallel = FieldSection({**asked.config.parallel, "context_parallel_size": 2})
    train_section = attrs.evolve(asked.config.train, global_batch_size=1)
    config = attrs.evolve(asked.config, parallel=parallel, train=train_section)
    asked = attrs.evolve(asked, config=config)
    with built_from(asked) as (hooks, context):
        task = hooks.require("ascend_task", config=context.config)
        plan = BatchPlan.of_rank(context.config, context.layout)
        read = BatchReader(hooks, context, task.batch_fields, plan)
        batch = next(read(samples(DENSE, 1), 0, "test's"))
        model = context.models["policy"].chunks[0].module
        return {
            "batch": batch.tensors["position_ids"][0].tolist(),
            "rotary": model.rotary.positions(16).tolist(),
            "before the cut": before[0],
        }


def log_lines_heard(folder: str) -> list[tuple[int, float]]:
    """Step and loss of every logged step that this rank logs."""
    _take_place()
    heard: list[tuple[int, float]] = []
    listen = lambda self, metrics: heard.append((metrics["step"], metrics["loss"]))  # noqa: E731
    values = {"train.train_iters": 2, "train.global_batch_size": 2}
    train(Path(folder), probe("ascend_after_log", listen), values=values)
    return heard


class Halves:
    """contracts.CheckpointEntry: a tensor of this rank, and its part of one of the whole run."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.own = torch.full((2,), -1.0)
        self.shared = torch.full((4 // self.size,), -1.0)
        self.number = -1

    def state_dict(self) -> dict[str, Any]:
        shared = TensorShard(
            key="",
            tensor=self.shared,
            global_shape=(4,),
            offset=(self.rank * len(self.shared),),
        )
        return {"own": self.own, "shared": shared, "number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.own, self.shared, self.number = state["own"], state["shared"], state["number"]


class Shared(Halves):
    """The same without what is this rank's."""

    def state_dict(self) -> dict[str, Any]:
        return {key: item for key, item in super().state_dict().items() if key != "own"}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({"own": self.own, **state})


def train_with_entries(folder: str, steps: int) -> dict[str, tuple[list[float], list[float], int]]:
    """Train up to a step with two entries; what they held at its beginning."""
    _take_place()
    entries = {"halves": Halves(), "shared": Shared()}
    found: dict[str, tuple[list[float], list[float], int]] = {}

    def look(self: Any) -> None:
        for name, entry in entries.items():
            found[name] = (entry.own.tolist(), entry.shared.tolist(), entry.number)

    def count(self: Any, context: Any) -> None:
        for entry in entries.values():
            entry.number = context.step
            entry.own = torch.full((2,), float(entry.rank))
            first = entry.rank * len(entry.shared)
            entry.shared = torch.arange(first, first + len(entry.shared)).float()

    keeper = plugin(
        "keeper",
        {
            "ascend_checkpoint_entries": lambda self: entries,
            "ascend_before_run": look,
            "ascend_after_step": count,
        },
    )()
    values = {
        "train.train_iters": steps,
        "train.global_batch_size": 2,
        "checkpoint.save_interval": 1,
        "optimizer.lr_decay_style": "constant",
    }
    train(Path(folder), keeper, values=values)
    return found
