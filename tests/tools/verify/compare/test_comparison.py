"""Each thing that is compared is seen to differ, by itself, on runs made up for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ascend_run.tools.verify.capture.projections import projections
from ascend_run.tools.verify.capture.record import Record, RecordedShard
from ascend_run.tools.verify.compare.comparison import compare
from ascend_run.tools.verify.compare.thresholds import (
    ADAM_EPSILON,
    FLOAT32_EPS,
    LEARNING_RATE,
)
from ascend_run.tools.verify.compare.verdict import Phase
from tests.tools.verify.compare.made_up import moments, records


def failed(candidate: Any, **how: Any) -> set[str]:
    comparison = compare(candidate, records(), against="plain", **how)
    return {check.name for check in comparison.checks if not check.passed}


def test_equal_runs_are_equal_in_every_bit() -> None:
    comparison = compare(records(), records(), against="plain", same_layout=True)
    assert comparison.same_bits
    assert comparison.fault is None
    assert all(check.passed for check in comparison.checks)


@pytest.mark.parametrize(
    ("changes", "wrong", "phase", "module"),
    [
        ({"loss": 2.6}, "loss", Phase.FORWARD, "loss"),
        ({"num_tokens": 11}, "counts", Phase.FORWARD, "loss"),
        ({"step_tokens": [10, 11]}, "counts", Phase.FORWARD, "loss"),
        ({"micro_batches": 3}, "counts", Phase.FORWARD, "schedule"),
        ({"losses": [2.5, 2.41]}, "losses", Phase.FORWARD, "loss"),
        ({"grad_norms": [1.0, 0.91]}, "gradient norms", Phase.OPTIMIZER, "gradient norm"),
        ({"generators": {"torch": "bb"}}, "random streams", Phase.FORWARD, "random streams"),
    ],
    ids=str,
)
def test_a_number_that_differs_is_found(
    changes: dict[str, Any], wrong: str, phase: Phase, module: str
) -> None:
    candidate = records(**changes)
    comparison = compare(candidate, records(), against="plain", same_layout=True)
    assert {check.name for check in comparison.checks if not check.passed} == {wrong}
    assert comparison.fault is not None
    assert (comparison.fault.phase, comparison.fault.module) == (phase, module)


@pytest.mark.parametrize(
    ("reading", "wrong", "phase"),
    [
        ("initial", "initial weights", Phase.FORWARD),
        ("gradients", "gradients", Phase.BACKWARD),
        ("weights", "weights after step 2", Phase.OPTIMIZER),
    ],
)
def test_a_tensor_that_differs_is_found_and_names_its_module(
    reading: str, wrong: str, phase: Phase
) -> None:
    candidate = records()
    values = getattr(candidate[0], reading)
    (values[1] if reading == "weights" else values)[0][1, 2] *= 1.001
    comparison = compare(candidate, records(), against="plain")
    assert {check.name for check in comparison.checks if not check.passed} == {wrong}
    assert comparison.fault is not None
    assert comparison.fault.phase is phase
    assert comparison.fault.module in ("a.b", "optimizer")


def from_zero(share: float, factor: float = 1.0, rounding: float = 0.0) -> list[Record]:
    """A run in which a weight consists of its updates, each a share of the learning rate."""
    (record,) = records()
    for step, (_, frozen) in enumerate(record.weights, start=1):
        weight = torch.full((2, 3), LEARNING_RATE * step * (factor * share + rounding))
        record.weights[step - 1] = [weight, frozen]
    return [record]


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_updates_that_are_a_tenth_too_small_are_found(share: float) -> None:
    comparison = compare(from_zero(share, factor=0.9), from_zero(share), against="plain")
    wrong = {check.name for check in comparison.checks if not check.passed}
    assert wrong == {"weights after step 1", "weights after step 2"}
    assert comparison.fault is not None
    assert comparison.fault.phase is Phase.OPTIMIZER


def test_rounding_errors_of_small_updates_are_allowed() -> None:
    """They are those of the gradient, over Adam's epsilon."""
    candidate = from_zero(0.01, rounding=FLOAT32_EPS / ADAM_EPSILON * 0.1)
    assert compare(candidate, from_zero(0.01), against="plain").fault is None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_run_with_only_its_last_weights_is_compared_at_them(is_wrong: bool) -> None:
    """As with ``ddp.overlap_param_gather``; the oracle has the weights of every step."""
    (candidate,) = records()
    candidate.weights = candidate.weights[1:]
    if is_wrong:
        candidate.weights[0][0][1, 2] *= 1.001
    comparison = compare([candidate], records(), against="the oracle")
    names = [check.name for check in comparison.checks if check.name.startswith("weights after")]
    assert names == ["weights after step 2"]
    assert (comparison.fault is not None) is is_wrong


def changed_in_step_2(*, loss: bool, gradient: bool, weight: bool) -> list[Record]:
    (record,) = records()
    if loss:
        record.losses = [2.5, 2.41]
    if gradient:
        wrong = projections(torch.full((2, 3), 0.1), (0, 0), (2, 3))
        record.step_gradients = [record.step_gradients[0], [wrong, None]]
    if weight:
        record.weights[1][0][1, 2] *= 1.001
    return [record]


@pytest.mark.parametrize(
    ("loss", "gradient", "phase", "module", "why"),
    [
        (False, False, Phase.OPTIMIZER, "optimizer", "gradients up to step 2 are correct"),
        (False, True, Phase.BACKWARD, "a.b", "the gradient of a.b.weight in step 2 is wrong"),
        (True, True, Phase.FORWARD, "loss", "the loss of step 2 is wrong, although the weights"),
    ],
)
def test_a_difference_of_a_later_batch_is_found_in_its_phase(
    loss: bool, gradient: bool, phase: Phase, module: str, why: str
) -> None:
    candidate = changed_in_step_2(loss=loss, gradient=gradient, weight=True)
    fault = compare(candidate, records(), against="plain").fault
    assert fault is not None
    assert (fault.phase, fault.module, fault.step) == (phase, module, 2)
    assert fault.why.startswith(why)


@pytest.mark.parametrize(
    ("loss", "phase"), [(2.6, Phase.FORWARD), (2.5, Phase.BACKWARD)], ids=["loss", "its gradient"]
)
def test_what_a_task_computes_of_the_output_is_the_loss(loss: float, phase: Phase) -> None:
    """Its gradient is wrong where it enters the model, and so are those of all weights."""
    candidate, reference = records(loss=loss), records()
    candidate[0].gradients = [2 * reference[0].gradients[0], None]
    for record, value in ((candidate[0], 2.0), (reference[0], 1.0)):
        record.forward[0]["model|out|0"] = moments(1.0)
        record.backward[0] = {"model|out|0": moments(value), "a|out|0": moments(3 * value)}
    fault = compare(candidate, reference, against="plain").fault
    assert fault is not None
    assert (fault.phase, fault.module) == (phase, "loss")


def five_modules(wrong: Sequence[int] = ()) -> list[Record]:
    """A run of five modules with a weight each; some have wrong updates, but right gradients."""
    (record,) = records()
    weight, shape = record.initial[0], (2, 3)
    record.places = [
        RecordedShard(name=f"m{i}.weight", offset=(0, 0), global_shape=shape, trains=True)
        for i in range(5)
    ]
    record.initial, record.gradients = [weight] * 5, [weight / 7] * 5
    record.peaks = [0.5] * 5
    record.step_gradients = [[projections(weight / 7, (0, 0), shape)] * 5] * 2
    record.weights = [
        [(weight - 0.1 * step * (1.1 if i in wrong else 1.0)).float() for i in range(5)]
        for step in (1, 2)
    ]
    return [record]


@pytest.mark.parametrize(
    ("wrong", "recorded", "module", "suspects"),
    [
        ([2], True, "m2", ()),
        ([2, 4], True, "optimizer", ("m2", "m4")),
        ([2, 4], False, "m2", ("m4",)),
        ([0, 2, 4], False, "optimizer", ("m0", "m2", "m4")),
    ],
)
def test_wrong_updates_of_several_modules_are_the_optimizers(
    wrong: list[int], recorded: bool, module: str, suspects: tuple[str, ...]
) -> None:
    candidate = five_modules(wrong)
    candidate[0].step_gradients = candidate[0].step_gradients if recorded else []
    fault = compare(candidate, five_modules(), against="plain").fault
    assert fault is not None
    assert (fault.phase, fault.module) == (Phase.OPTIMIZER, module)
    assert {*fault.suspects} == {*suspects}


def test_gradients_that_were_not_recorded_are_not_said_to_be_correct() -> None:
    candidate = changed_in_step_2(loss=False, gradient=False, weight=True)
    candidate[0].step_gradients = []
    fault = compare(candidate, records(), against="plain").fault
    assert fault is not None
    assert fault.why.startswith("gradients of the first batch are correct")


def test_a_gradient_alone_that_differs_in_a_step_is_no_failure() -> None:
    """It only locates what another check finds."""
    candidate = changed_in_step_2(loss=False, gradient=True, weight=False)
    assert compare(candidate, records(), against="plain").fault is None


@pytest.mark.parametrize(
    "changes",
    [{"micro_batches": 0}, {"num_tokens": 0}, {"places": [], "initial": [], "gradients": []}],
    ids=["no micro-batch", "no token", "no parameter"],
)
def test_a_comparison_of_nothing_is_no_agreement(changes: dict[str, Any]) -> None:
    runs = [records(**changes) for _ in range(2)]
    if "places" in changes:
        for run in runs:
            run[0].weights = [[], []]
            run[0].step_gradients = [[], []]
    comparison = compare(runs[0], runs[1], against="plain")
    told = [detail for check in comparison.checks for detail in check.details]
    assert any("nothing to compare with" in detail for detail in told)
    assert comparison.fault is not None


def test_a_run_without_a_micro_batch_is_not_one_with_four() -> None:
    comparison = compare(records(micro_batches=0), records(), against="plain")
    (counts,) = [check for check in comparison.checks if check.name == "counts"]
    assert counts.details == ("0 micro-batches were run, expected 4",)
    assert comparison.fault is not None
    assert comparison.fault.module == "schedule"


def test_rounding_is_within_and_not_bitwise() -> None:
    candidate = records()
    candidate[0].gradients[0][0, 0] *= 1 + 1e-14
    comparison = compare(candidate, records(), against="plain")
    assert comparison.fault is None
    assert not comparison.same_bits
    assert failed(candidate, exact=True) == {"gradients"}


def test_a_missing_or_unowned_gradient_is_found() -> None:
    missing = records(gradients=[None, None])
    assert failed(missing) == {"gradients"}
    half = records()
    half[0].gradients[0] = half[0].gradients[0][:1]
    assert failed(half) == {"gradients"}


def test_every_gradient_of_the_wrong_scale_is_the_reductions() -> None:
    candidate = records()
    candidate[0].gradients[0] *= 0.5
    fault = compare(candidate, records(), against="plain").fault
    assert fault is not None
    assert fault.module == "gradient reduction"
    assert "0.5 x the expected" in fault.why


def test_the_first_module_whose_output_differs_is_named() -> None:
    candidate = records(loss=3.0)
    candidate[0].forward[0]["a|out|0"] = moments(2.1)
    fault = compare(candidate, records(), against="plain").fault
    assert fault is not None
    assert (fault.phase, fault.module) == (Phase.FORWARD, "a")


def test_a_gradient_of_twice_the_size_is_reported_as_a_ratio() -> None:
    candidate = records()
    gradients = candidate[0].gradients
    gradients[0].mul_(2.0)
    comparison = compare(candidate, records(), against="plain")
    check = next(check for check in comparison.checks if check.name == "gradients")
    assert check.details[0] == (
        "a.b.weight is wrong by 1.0e+00 of the largest value (tolerance 1e-10); "
        "it is 2 x the expected"
    )
