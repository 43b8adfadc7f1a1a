"""What a rank of the pool does for this suite."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.small_runs import Training, training

Values = Mapping[str, Any]


def step(run: Training) -> None:
    from ascend_run.core.train.step import StepEvents

    with StepEvents(run.hooks, run.context):
        run.step()
    run.context.consumed_samples = 0  # there is one global batch


def recorded(values: Values, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of two steps, of rank 0; and how many tensors its optimizer updates."""
    output = folder / "run"
    with training({**values, "run.output_dir": str(output)}, ["memory-timeline"]) as run:
        step(run)
        step(run)
        run.hooks.event("ascend_after_log")(context=run.context, metrics={})
        count = sum(1 for chunk in run.bundle.chunks for _ in chunk.parameters())
        if run.context.layout.rank != 0:
            return [], count
    lines = (output / "memory_timeline.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], count


def left_behind(values: Values, plugins: Sequence[str]) -> tuple[int, int]:
    """How many of the storages that a step saves outlive it, and how many recordings."""
    from ascend_run.plugins.logging.memory_timeline.recording import Recording

    saved: list[weakref.ref[torch.UntypedStorage]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with training(values, plugins) as run:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step(run)
        gc.collect()
        recordings = sum(type(found) is Recording for found in gc.get_objects())
        living = [storage for found in saved if (storage := found()) is not None]
        return len({storage._cdata for storage in living}), recordings


def kept_by_a_forward(seconds: float) -> int:
    """Bytes that are activations of a forward which leaves 3 KiB, and releases 5 KiB that another
    thread holds on to for some seconds, as gloo's do."""
    from ascend_run.plugin_api import RunPhase
    from ascend_run.plugins.logging.memory_timeline.recording import Recording

    record = Recording(1, [], torch.device("cpu"))
    with record.within(RunPhase.FORWARD):
        left = torch.zeros(3 * 1024, dtype=torch.uint8)
        held = [torch.zeros(5 * 1024, dtype=torch.uint8)]
        holder = threading.Thread(target=_hold, args=(held, seconds))
        holder.start()
    with record.within(RunPhase.BACKWARD):
        holder.join()
        del left
    samples = record.end(1)
    times = [sample["seconds"] for sample in samples]
    assert times == sorted(times)
    return max(sample["values"]["activations"] for sample in samples)


def _hold(held: list[Tensor], seconds: float) -> None:
    time.sleep(seconds)
    held.clear()
