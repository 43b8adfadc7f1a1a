"""Locate a difference that the first batch does not show, in the training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .full_tensors import owner
from .readings import SHOWN, Readings, num_trained, weights_after
from .step_gradients import wrong_gradients
from .verdict import Fault, Phase

Order = Callable[[Sequence[str]], Sequence[str]]
"""Sorts parameters by the order in which a backward reaches their modules."""


def locate_in_steps(readings: Readings, in_backward_order: Order) -> Fault | None:
    """Return the earliest of: a loss that differs although the weights before it do not, gradients
    that differ, and weights that differ although the gradients do not. None if there is neither."""
    recorded = True
    for index in range(len(readings.reference[-1].losses)):
        number = index + 1
        # Without the weights before it, a wrong loss may be an effect of them.
        starts_right = index == 0 or index >= readings.first
        if starts_right and f"step {number}" in readings.wrong["losses"]:
            return _at_loss(number)
        gradients = wrong_gradients(
            readings.candidate, readings.reference, index, exact=readings.exact
        )
        if gradients:
            return _at_gradients(readings, number, in_backward_order([*gradients]))
        recorded &= gradients is not None
        if weights := readings.wrong.get(weights_after(number)):
            return _at_weights(readings, number, weights, recorded=recorded)
    return None


def _at_loss(step: int) -> Fault:
    why = f"the loss of step {step} is wrong, although the weights before the step are correct"
    if step == 1:
        why = "the loss of step 1 is wrong, although that of its batch in float64 is correct"
    return Fault(phase=Phase.FORWARD, module="loss", why=why, step=step)


def _at_gradients(readings: Readings, step: int, wrong: Sequence[str]) -> Fault:
    """
    Args:
        wrong: Parameters in the order of the backward.
    """
    before = "those of its batch in float64 are" if step == 1 else "those of the first batch are"
    suspects = [*dict.fromkeys(map(owner, wrong))]
    if len(wrong) > 1 and len(wrong) > 0.9 * num_trained(readings.reference):
        return Fault(
            phase=Phase.BACKWARD,
            module="gradient reduction",
            suspects=tuple(suspects[:SHOWN]),
            why=f"the gradients of step {step} are wrong, of {len(wrong)} parameters; {before} "
            "correct",
            step=step,
        )
    return Fault(
        phase=Phase.BACKWARD,
        module=suspects[0],
        suspects=tuple(suspects[1:SHOWN]),
        why=f"the gradient of {wrong[0]} in step {step} is wrong; {before} correct",
        step=step,
    )


def _at_weights(readings: Readings, step: int, wrong: dict[str, float], *, recorded: bool) -> Fault:
    """
    Args:
        wrong: Parameter -> error.
        recorded: Whether the gradients of the steps were compared.
    """
    of = f"up to step {step}" if recorded else "of the first batch"
    why = f"gradients {of} are correct, weights after step {step} are not"
    worst = sorted(wrong, key=wrong.__getitem__, reverse=True)
    suspects = [*dict.fromkeys(map(owner, worst))]
    # Between right gradients and wrong weights there is only the optimizer: what it does wrong with
    # several modules is no module's fault. Without the gradients, most parameters must be wrong.
    most = 2 * len(wrong) > num_trained(readings.reference)
    several = recorded and len(suspects) > 1
    if (most or several) and not any(map(math.isinf, wrong.values())):
        suspects.insert(0, "optimizer")
        why = f"{why}, of {len(wrong)} tensors"
    return Fault(
        phase=Phase.OPTIMIZER,
        module=suspects[0],
        suspects=tuple(suspects[1:SHOWN]),
        why=why,
        step=step,
    )
