"""What must hold inside one run is seen not to, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch

from ascend_run.tools.verify.capture.record import Record
from ascend_run.tools.verify.compare.invariants import invariants
from ascend_run.tools.verify.compare.replicas import replica_checks
from ascend_run.tools.verify.compare.verdict import Phase
from tests.tools.verify.compare.made_up import records


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
        (start, "dp", "trained parameters", Phase.OPTIMIZER),
        (silent, "dp", "trained parameters", Phase.BACKWARD),
        (thawed, "dp", "frozen parameters", Phase.OPTIMIZER),
        (frozen_by_mistake, "dp", "trained parameters", Phase.BACKWARD),
        (trained_by_mistake, "dp", "frozen parameters", Phase.OPTIMIZER),
        (not_copied, "dp", "master weights", Phase.OPTIMIZER),
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


def test_a_parameter_unmoved_without_the_plugin_is_no_failure() -> None:
    ranks, reference = records(), records()
    for run in (ranks, reference):
        start(run)
        silent(run)
    assert invariants(ranks, reference)[1] is None
    assert invariants(ranks, records())[1] is not None


@pytest.mark.parametrize(
    ("peak", "rate", "held"), [(1e-2, 1e-3, True), (1e-6, 1e-3, False), (1e-2, 1e-8, False)]
)
def test_a_representable_step_is_required_if_the_reference_is_unmoved(
    peak: float, rate: float, held: bool
) -> None:
    """A parameter with a large enough gradient has to move, even if it moves in no run."""
    ranks, reference = records(), records()
    for run in (ranks, reference):
        start(run)
        for record in run:
            record.peaks = [peak, -1.0]
            record.rates = {"a.b.weight": [0.0, 0.0, rate]}
    fault = invariants(ranks, reference)[1]
    assert (fault is not None) is held
    if fault is not None:
        assert (fault.phase, fault.module) == (Phase.OPTIMIZER, "a.b")


def test_a_declared_frozen_parameter_may_require_a_gradient_unmoved() -> None:
    ranks = records()
    declared = attrs.evolve(ranks[0].places[1], trains=True, should_train=False)
    ranks[0].places = [ranks[0].places[0], declared]
    assert invariants(ranks, None)[1] is None


@pytest.mark.parametrize("within_first", [True, False])
def test_tied_weights_that_differ_later_or_earlier_are_found(within_first: bool) -> None:
    """Ranks 0 and 1 are of the first stage, and rank 2 of the last."""
    ranks = records(3)
    ranks[2].coordinates = {**ranks[2].coordinates, "pp": 1}
    within, across = (0, 1) if within_first else (1, 0)
    for record in ranks[1:]:
        record.weights[within][1] += 1.0
    ranks[2].weights[across][0] += 1.0
    found = replica_checks(ranks)
    assert [check.passed for check, _ in found] == [False, False]
    assert [check.where for check, _ in found] == ["c.weight", "a.b.weight"]
    assert [fault is not None for _, fault in found] == [within_first, not within_first]


@pytest.mark.parametrize(
    ("axis", "empty"),
    [
        (None, {"replicas over ranks", "tied weights", "random streams", "master weights"}),
        ("dp", {"tied weights", "master weights"}),
        ("pp", {"replicas over ranks", "master weights"}),
    ],
)
def test_a_check_without_anything_to_compare_does_not_apply(
    axis: str | None, empty: set[str]
) -> None:
    checks, _ = invariants(records() if axis is None else records(2, axis), None)
    assert {check.name for check in checks if check.state == "-"} == empty


def test_master_weights_are_compared_if_the_optimizer_has_copies() -> None:
    states = {check.name: check.state for check in invariants(records(num_masters=1), None)[0]}
    assert states["master weights"] == "ok"


def test_no_frozen_parameter_leaves_nothing_to_compare() -> None:
    ranks = records()
    ranks[0].places = [attrs.evolve(place, trains=True) for place in ranks[0].places]
    states = {check.name: check.state for check in invariants(ranks, None)[0]}
    assert states["frozen parameters"] == "-"
