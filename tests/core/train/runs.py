"""Whole runs by ``run_training``, on token files, as jobs for the pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api import hookimpl
from ascend_run.plugin_api.manifest import Manifest
from ascend_run.testing.pool import GlooPool
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from tests.support.small_runs import Values, prepare, rank_environment

STEPS, HALF = 6, 3


def write_tokens(prefix: Path, vocabulary: int, documents: int, seed: int) -> str:
    """Random documents of 20 to 60 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 60, (documents,), generator=generator).tolist()
    with bin_path(str(prefix)).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(vocabulary))
        for length in lengths:
            writer.add(torch.randint(vocabulary, (length,), generator=generator).tolist())
    idx_path(str(prefix)).write_bytes(writer.index())
    return str(prefix)


@attrs.frozen
class Ended:
    """A run on one rank, as it stood at its end."""

    readings: list[dict[str, Any]]
    """Lines of metrics.jsonl that name a step, without what depends on the clock."""
    tensors: dict[str, Tensor]
    """Weights, the optimizer's state and the random generators."""
    values: dict[str, Any]
    """Progress: steps, samples, the schedule, the loss scale."""


class Watch:
    """A plugin that keeps what the run held when it ended."""

    manifest = Manifest(name="watch", summary="keep the end of a run")

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}

    @hookimpl
    def ascend_after_run(self, context: c.RunContext) -> None:
        from ascend_run.core.hooks import Hooks
        from ascend_run.core.train.checkpointing import Checkpoints

        folder = Path(context.config.run.output_dir)
        checkpoints = Checkpoints(Hooks([]), context, folder)
        with checkpoints.state() as (shards, self.values):
            self.tensors = {f"{p.key}{p.offset}": p.tensor.detach().clone() for p in shards}


_CLOCK = ("time", "tokens_per_second", "step_seconds", "memory_bytes", "memory_peak_bytes")


def whole_run(values: Values, enable: Sequence[str] = (), *more: Any) -> Ended:
    """Train as an entry point does, on the ranks that are there.

    Args:
        more: Instances of plugins that are not installed, outermost.
    """
    from ascend_run.core.run import run_training

    watch = Watch()
    with rank_environment() as size:
        prepared = prepare(values, enable, size)
        run_training(prepared.run_request(*more, watch))
        if dist.is_initialized():
            dist.barrier()
    return Ended(
        [{k: v for k, v in line.items() if k not in _CLOCK} for line in lines(values)],
        watch.tensors,
        watch.values,
    )


def lines(values: Values) -> list[dict[str, Any]]:
    """Readings and evaluations, in the order of the file."""
    path = Path(values["run.output_dir"]) / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if "event" not in record]


def assert_same(first: Sequence[Ended], second: Sequence[Ended]) -> None:
    """Bit for bit, rank by rank."""
    for one, other in zip(first, second, strict=True):
        assert one.values == other.values
        assert one.tensors.keys() == other.tensors.keys()
        differing = [n for n, t in one.tensors.items() if not torch.equal(t, other.tensors[n])]
        assert not differing, differing


def assert_the_same_in_two_halves(
    run: Callable[..., Sequence[Ended]], steps: int, half: int
) -> Sequence[Ended]:
    """Compare a run with one that is resumed, bit for bit, and every step's readings.

    Args:
        run: Trains in the folder of a name, with changes of values by their keys, ``__`` for dots.
        half: Steps after which the second run ends, and is resumed.

    Returns:
        The run without an end in between.
    """
    straight = run("straight", train__train_iters=steps)
    run("halves", train__train_iters=half, checkpoint__save_interval=half)
    halves = run("halves", train__train_iters=steps, checkpoint__save_interval=half)
    assert_same(halves, straight)
    assert halves[0].readings == straight[0].readings
    return straight


class Runs:
    """Runs of one kind, in folders of their own, all on the same token files."""

    def __init__(self, pool: GlooPool, folder: Path, kind: Any, *more: Any) -> None:
        self.pool, self.folder, self.more = pool, folder, more
        self.values, self.world_size, self.plugins = kind
        self.data = {
            "data.train": [write_tokens(folder / "train", 90, 40, seed=1)],
            "data.validation": [write_tokens(folder / "validation", 90, 10, seed=2)],
            "data.cache_dir": str(folder / "cache"),
            "train.train_iters": STEPS,
            "train.eval_iters": 2,
            "optimizer.lr_decay_iters": STEPS,
        }

    def __call__(self, name: str, **options: Any) -> list[Ended]:
        changes = {key.replace("__", "."): value for key, value in options.items()}
        values = {
            **self.values,
            **self.data,
            "run.output_dir": str(self.folder / name),
            **changes,
        }
        plugins = (self.plugins, *self.more)
        return self.pool.run(whole_run, self.world_size, values, *plugins, timeout=100)

    def assert_the_same_in_two_halves(self) -> None:
        """Bit for bit, and every step's readings."""
        straight = self("straight")
        first = self("halves", train__train_iters=HALF, checkpoint__save_interval=HALF)
        assert first[0].values["progress"]["step"] == HALF
        second = self("halves", checkpoint__save_interval=HALF)
        assert_same(second, straight)
        assert second[0].readings == straight[0].readings
        assert [line["step"] for line in straight[0].readings] == [*range(1, STEPS + 1)]
        assert len({line["loss"] for line in straight[0].readings}) == STEPS
