"""A trial in which the order of backwards and of fetches is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ascend_run.ops.swapping.backward_order import BackwardOrder
from ascend_run.ops.swapping.call import Call
from ascend_run.ops.swapping.swapper import Swapper
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial

Forward = tuple[int, int, int]
"""Chunk, index of the layer in it, and micro-batch."""
Record = list[tuple[str, Forward]]
"""``backward`` when that of a forward starts, ``fetch`` when its copies to the device start."""


def recorded_trial(trial: Trial) -> tuple[RankOutcome, list[Record]]:
    """Return the outcome, and the record of each step. A rank's job."""
    with _recording() as steps:
        return run_trial(trial), steps


@contextmanager
def _recording() -> Iterator[list[Record]]:
    steps: list[Record] = []
    forwards: list[Forward] = []
    begin_step, begin = Swapper.begin_step, Swapper._begin
    fetch, came = Call.fetch, BackwardOrder.came

    def on_step(swapper: Swapper) -> None:
        steps.append([])
        forwards.clear()
        begin_step(swapper)

    def on_forward(swapper: Swapper, layer: tuple[int, int], *rest: Any) -> Call:
        forwards.append((*layer, sum(known[:2] == layer for known in forwards)))
        return begin(swapper, layer, *rest)

    def on_fetch(call: Call) -> None:
        steps[-1].append(("fetch", forwards[call.number]))
        fetch(call)

    def on_backward(order: BackwardOrder, number: int) -> None:
        steps[-1].append(("backward", forwards[number]))
        came(order, number)

    with (
        patch.object(Swapper, "begin_step", on_step),
        patch.object(Swapper, "_begin", on_forward),
        patch.object(Call, "fetch", on_fetch),
        patch.object(BackwardOrder, "came", on_backward),
    ):
        yield steps
