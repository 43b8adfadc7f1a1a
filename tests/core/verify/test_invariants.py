"""What must hold inside one run is seen not to, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ascend_run.core.verify.invariants import invariants
from ascend_run.core.verify.record import Record
from ascend_run.core.verify.verdict import Phase
from tests.core.verify.made_up import records


def gradient(ranks: list[Record]) -> None:
    ranks[1].gradients[0][0, 0] += 1e-3


def weight(ranks: list[Record]) -> None:
    values = ranks[1].weights[1][0]
    values.copy_(torch.nextafter(values, torch.full_like(values, 9.0)))


def start(ranks: list[Record]) -> None:
    for record in ranks:
        record.weights[-1][0] = record.initial[0].float()


def silent(ranks: list[Record]) -> None:
    for record in ranks:
        record.peaks = [0.0, -1.0]


def thawed(ranks: list[Record]) -> None:
    for record in ranks:
        record.weights[-1][1] += 1.0


def stream(ranks: list[Record]) -> None:
    ranks[1].generators = {**ranks[1].generators, "torch": "bb"}


def one_stream(ranks: list[Record]) -> None:
    for record in ranks:
        record.generators = {"tracker model-parallel-rng": "m"}


@pytest.mark.parametrize(
    ("change", "axis", "wrong", "phase"),
    [
        (gradient, "dp", "replicas over ranks", Phase.BACKWARD),
        (weight, "dp", "replicas over ranks", Phase.OPTIMIZER),
        (gradient, "pp", "tied weights", Phase.BACKWARD),
        (weight, "pp", "tied weights", Phase.OPTIMIZER),
        (start, "dp", "parameters that must move", Phase.OPTIMIZER),
        (silent, "dp", "parameters that must move", Phase.BACKWARD),
        (thawed, "dp", "parameters that must not move", Phase.OPTIMIZER),
        (stream, "dp", "random streams", Phase.FORWARD),
        (one_stream, "tp", "random streams", Phase.FORWARD),
    ],
)
def test_what_does_not_hold_is_found(
    change: Callable[[list[Record]], None], axis: str, wrong: str, phase: Phase
) -> None:
    ranks = records(2, axis)
    if axis == "pp":
        for record in ranks:
            record.generators = {}
    checks, fault = invariants(ranks, None)
    assert all(check.passed for check in checks)
    assert fault is None
    change(ranks)
    checks, fault = invariants(ranks, None)
    assert {check.name for check in checks if not check.passed} == {wrong}
    assert fault is not None
    assert fault.phase is phase
    if "streams" not in wrong:
        assert fault.module in ("a.b", "c")


def test_what_does_not_move_without_the_plugin_either_is_not_held_against_it() -> None:
    ranks, reference = records(), records()
    for run in (ranks, reference):
        start(run)
        silent(run)
    assert invariants(ranks, reference)[1] is None
    assert invariants(ranks, records())[1] is not None
