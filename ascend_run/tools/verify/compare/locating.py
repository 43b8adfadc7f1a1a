"""Locate where two runs begin to differ, from their tensors and the moments of their modules."""

from __future__ import annotations

import math
from collections.abc import Iterable

from . import modules
from .full_tensors import owner
from .groups import GROUPS
from .locating_steps import locate_in_steps
from .modules import Trace
from .readings import SHOWN, Readings, num_microbatches, num_trained
from .thresholds import MODULE
from .verdict import Fault, Phase


def locate(readings: Readings, failed: set[str], trace: Trace, expected_trace: Trace) -> Fault:
    """Return the module and phase at which the runs begin to differ.

    Args:
        failed: Names of the failed checks; at least one.
    """
    return _Locating(readings, trace, expected_trace).locate(failed)


class _Locating:
    def __init__(self, readings: Readings, trace: Trace, expected_trace: Trace) -> None:
        self.readings, self.wrong = readings, readings.wrong
        self.trace, self.expected_trace = trace, expected_trace

    def locate(self, failed: set[str]) -> Fault:
        if self.wrong.get("initial weights"):
            return self._at_parameters("initial weights", Phase.FORWARD, "initial weights differ")
        if failed & {"counts", "loss", "gradients"}:
            return self._in_the_model(failed)
        if GROUPS in failed:
            return self._at_groups()
        in_steps = failed - {"random streams"}
        if in_steps and (later := locate_in_steps(self.readings, self._in_backward_order)):
            return later
        if "gradient norms" in failed:
            return Fault(phase=Phase.OPTIMIZER, module="gradient norm", why="only it differs")
        if "losses" in failed:
            return Fault(phase=Phase.FORWARD, module="loss", why="only it differs")
        return Fault(
            phase=Phase.FORWARD,
            module="random streams",
            why="the state of a random number generator differs",
        )

    def _in_the_model(self, failed: set[str]) -> Fault:
        tolerance = 0.0 if self.readings.exact else MODULE
        missing = self._micro_batches_differ()
        origin = modules.first_forward(self.trace, self.expected_trace, tolerance)
        if missing and (origin is None or origin.module != modules.BATCH):
            return Fault(
                phase=Phase.FORWARD, module="schedule", why="micro-batches were skipped or added"
            )
        if origin is not None:
            return Fault(
                phase=Phase.FORWARD, module=origin.module, suspects=origin.suspects, why=origin.why
            )
        wrong = self.wrong["gradients"]
        origin = modules.first_backward(self.trace, self.expected_trace, tolerance)
        if origin is not None and origin.suspects == (modules.ROOT,):
            # What the task computes of the model's output; every gradient follows from it.
            phase = Phase.FORWARD if "loss" in failed else Phase.BACKWARD
            return Fault(phase=phase, module=origin.module, why=origin.why)
        orders = modules.backward_orders(self.expected_trace)
        first = self._in_backward_order(wrong)
        if origin is not None:
            before = [n for n in first if orders.get(self._watched_owner(n), -1) < origin.order]
            if not before:
                return Fault(
                    phase=Phase.BACKWARD,
                    module=origin.module,
                    suspects=origin.suspects,
                    why=origin.why,
                )
            first = before
        if not wrong:
            what = "loss" if "loss" in failed else "number of tokens"
            return Fault(
                phase=Phase.FORWARD,
                module="loss",
                why=f"the reported {what} differs, but no module's output does",
            )
        common = {
            round(times, 6) for n in wrong if (times := self.readings.factors.get(n)) is not None
        }
        total = num_trained(self.readings.reference)
        missing_some = any(map(math.isinf, wrong.values()))
        whole = len(wrong) > 0.9 * total and (total > 1 or len(common) == 1)
        if origin is None and whole and not missing_some:
            error = f"{common.pop():.6g} x the expected" if len(common) == 1 else "wrong"
            return Fault(
                phase=Phase.BACKWARD,
                module="gradient reduction",
                suspects=tuple(dict.fromkeys(map(self._watched_owner, first)))[:SHOWN],
                why=f"every weight gradient is {error}, but activation gradients are correct",
            )
        suspects = [*dict.fromkeys(self._watched_owner(name) for name in first)]
        return Fault(
            phase=Phase.BACKWARD,
            module=suspects[0],
            suspects=tuple(suspects[1:SHOWN]),
            why=f"the gradient of {first[0]} is wrong, but the one at its output is correct",
        )

    def _at_groups(self) -> Fault:
        wrong = self.wrong[GROUPS]
        modules = [*dict.fromkeys(map(owner, wrong))]
        # Several parameters in a wrong group are a rule of the optimizer's, not of a module.
        return Fault(
            phase=Phase.OPTIMIZER,
            module=modules[0] if len(wrong) == 1 else "optimizer",
            suspects=tuple(modules[len(wrong) == 1 :])[:SHOWN],
            why=f"{len(wrong)} parameters have a wrong weight decay or learning rate",
        )

    def _micro_batches_differ(self) -> bool:
        candidate, reference = self.readings.candidate, self.readings.reference
        return num_microbatches(candidate) != num_microbatches(reference)

    def _watched_owner(self, parameter: str) -> str:
        """The innermost module with a parameter that is called. Modules that are never called have
        no moments: an output layer whose weight the loss uses, or a ModuleList."""
        module = owner(parameter)
        known = {key.partition("|")[0] for key in self.expected_trace.forward}
        while module and module not in known:
            module = module.rpartition(".")[0]
        return module or owner(parameter)

    def _in_backward_order(self, parameters: Iterable[str]) -> list[str]:
        orders = modules.backward_orders(self.expected_trace)
        # The loss uses the output layer's weight without calling the layer.
        return sorted(parameters, key=lambda name: orders.get(self._watched_owner(name), -1))

    def _at_parameters(self, check: str, phase: Phase, why: str) -> Fault:
        wrong = self.wrong[check]
        worst = sorted(wrong, key=wrong.__getitem__, reverse=True)
        suspects = [*dict.fromkeys(map(owner, worst))]
        return Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:SHOWN]), why=why)
