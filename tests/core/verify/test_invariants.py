"""What must hold inside one run is seen not to, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import attrs
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


def frozen_by_mistake(ranks: list[Record]) -> None:
    for record in ranks:
        declared = attrs.evolve(record.places[0], trains=False, should_train=True)
        record.places = [declared, record.places[1]]


def trained_by_mistake(ranks: list[Record]) -> None:
    thawed(ranks)
    for record in ranks:
        declared = attrs.evolve(record.places[1], trains=True, should_train=False)
        record.places = [record.places[0], declared]


def not_copied(ranks: list[Record]) -> None:
    ranks[1].stale = ["a.b.weight"]


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
        (frozen_by_mistake, "dp", "parameters that must move", Phase.BACKWARD),
        (trained_by_mistake, "dp", "parameters that must not move", Phase.OPTIMIZER),
        (not_copied, "dp", "weights as stepped", Phase.OPTIMIZER),
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


@pytest.mark.parametrize(("peak", "held"), [(1e-2, True), (1e-6, False)])
def test_a_step_that_must_be_seen_is_asked_for_though_the_reference_does_not_move(
    peak: float, held: bool
) -> None:
    ranks, reference = records(), records()
    for run in (ranks, reference):
        start(run)
        for record in run:
            record.peaks = [peak, -1.0]
    fault = invariants(ranks, reference)[1]
    assert (fault is not None) is held
    if fault is not None:
        assert (fault.phase, fault.module) == (Phase.OPTIMIZER, "a.b")


def test_what_is_declared_frozen_may_ask_for_a_gradient_and_stay_where_it_was() -> None:
    ranks = records()
    declared = attrs.evolve(ranks[0].places[1], trains=True, should_train=False)
    ranks[0].places = [ranks[0].places[0], declared]
    assert invariants(ranks, None)[1] is None
