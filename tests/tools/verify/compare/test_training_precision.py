"""Half precision is judged by what rounding does to the reference, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ascend_run.tools.verify.capture.record import Record
from ascend_run.tools.verify.compare.training_precision import compare_in_training_precision
from ascend_run.tools.verify.compare.verdict import Check, Fault, Phase
from tests.tools.verify.compare.made_up import records


def rounded(run: list[Record], by: float) -> list[Record]:
    """What a run in half precision reads: every reading a little off."""
    for record in run:
        record.loss *= 1 + by
        record.losses = [loss * (1 - by) for loss in record.losses]
        record.gradients = [g if g is None else g.bfloat16() * (1 + by) for g in record.gradients]
        record.weights = [[w.bfloat16() for w in weights] for weights in record.weights]
    return run


def judged(
    candidate: Sequence[Record], *, by: float = 1e-3, bitwise: bool = False
) -> tuple[list[Check], Fault | None]:
    return compare_in_training_precision(
        candidate,
        rounded(records(), by),
        records(),
        against="plain",
        precision="bf16",
        bitwise=bitwise,
    )


def test_the_errors_of_rounding_are_none() -> None:
    checks, fault = judged(rounded(records(), -2e-3))
    assert fault is None
    assert all(check.passed for check in checks)
    assert all(check.name.endswith(", bf16") for check in checks)


@pytest.mark.parametrize(
    ("reading", "factor", "name", "phase", "module"),
    [
        ("loss", 1.1, "loss, bf16", Phase.FORWARD, "loss"),
        ("gradients", 1.1, "gradients, bf16", Phase.BACKWARD, "a.b"),
        ("gradients", float("nan"), "gradients, bf16", Phase.BACKWARD, "a.b"),
        ("grad_norms", 1.1, "gradient norms, bf16", Phase.OPTIMIZER, "gradient norm"),
        ("weights", 1.1, "weights after the steps, bf16", Phase.OPTIMIZER, "a.b"),
    ],
)
def test_what_is_further_off_than_rounding_is_found(
    reading: str, factor: float, name: str, phase: Phase, module: str
) -> None:
    candidate = rounded(records(), 1e-3)
    (record,) = candidate
    if reading == "loss":
        record.loss *= factor
    elif reading == "grad_norms":
        record.grad_norms = [norm * factor for norm in record.grad_norms]
    elif reading == "gradients":
        record.gradients = [record.gradients[0] * factor, None]
    else:
        record.weights[-1][0] *= factor
    checks, fault = judged(candidate)
    assert {check.name for check in checks if not check.passed} == {name}
    assert fault is not None
    assert (fault.phase, fault.module) == (phase, module)


def test_a_reference_that_rounds_much_allows_much() -> None:
    candidate = rounded(records(), 0.1)
    assert judged(candidate)[1] is not None
    assert judged(candidate, by=0.08)[1] is None


def test_a_gradient_that_is_missing_is_found() -> None:
    candidate = rounded(records(), 1e-3)
    candidate[0].gradients = [None, None]
    fault = judged(candidate)[1]
    assert fault is not None
    assert fault.phase is Phase.BACKWARD


def test_what_is_declared_bitwise_may_differ_in_no_bit() -> None:
    assert judged(rounded(records(), 1e-3), bitwise=True)[1] is None
    candidate = rounded(records(), 1e-3)
    candidate[0].gradients[0].view(torch.int16)[0, 0] ^= 1
    checks, fault = judged(candidate, bitwise=True)
    assert {check.name for check in checks if not check.passed} == {"gradients, bf16"}
    assert fault is not None
    assert fault.phase is Phase.BACKWARD
