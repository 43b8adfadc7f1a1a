"""Where two runs begin to differ, from what was read of them and of their modules."""

from __future__ import annotations

import math

from . import modules
from .modules import Trace
from .readings import SHOWN, Readings, num_micro_batches, num_trained
from .thresholds import MODULE
from .verdict import Fault, Phase
from .wholes import owner


def locate(readings: Readings, failed: set[str], trace: Trace, expected_trace: Trace) -> Fault:
    """
    Args:
        failed: Names of checks; at least one.
    """
    return _Locating(readings, trace, expected_trace).locate(failed)


class _Locating:
    def __init__(self, readings: Readings, trace: Trace, expected_trace: Trace) -> None:
        self.readings, self.wrong = readings, readings.wrong
        self.trace, self.expected_trace = trace, expected_trace

    def locate(self, failed: set[str]) -> Fault:
        if self.wrong["initial weights"]:
            return self._at_parameters("initial weights", Phase.FORWARD, "it starts from others")
        if failed & {"counts", "loss", "gradients"}:
            return self._in_the_model(failed)
        for step in range(self.readings.steps):
            wrong = self.wrong[f"weights after step {self.readings.first + step}"]
            if wrong:
                why = (
                    f"gradients are right, weights after step {self.readings.first + step} are not"
                )
                total = num_trained(self.readings.reference)
                if 2 * len(wrong) > total and not any(map(math.isinf, wrong.values())):
                    worst = sorted(wrong, key=wrong.__getitem__, reverse=True)
                    return Fault(
                        phase=Phase.OPTIMIZER,
                        module="optimizer",
                        suspects=tuple(map(owner, worst))[:SHOWN],
                        why=f"{why}, of {len(wrong)} tensors",
                    )
                name = f"weights after step {self.readings.first + step}"
                return self._at_parameters(name, Phase.OPTIMIZER, why)
        if "gradient norms" in failed:
            return Fault(phase=Phase.OPTIMIZER, module="gradient norm", why="it alone differs")
        if "losses" in failed:
            return Fault(phase=Phase.FORWARD, module="loss", why="it alone differs")
        return Fault(
            phase=Phase.FORWARD, module="random streams", why="a generator stands elsewhere"
        )

    def _in_the_model(self, failed: set[str]) -> Fault:
        tolerance = 0.0 if self.readings.exact else MODULE
        missing = self._micro_batches_differ()
        place = modules.first_forward(self.trace, self.expected_trace, tolerance)
        if missing and (place is None or place.module != modules.BATCH):
            return Fault(
                phase=Phase.FORWARD, module="schedule", why="micro-batches were left out or added"
            )
        if place is not None:
            return Fault(
                phase=Phase.FORWARD, module=place.module, suspects=place.suspects, why=place.why
            )
        wrong = self.wrong["gradients"]
        place = modules.first_backward(self.trace, self.expected_trace, tolerance)
        orders = modules.backward_orders(self.expected_trace)
        # The loss takes the output layer's weight without calling it.
        first = sorted(wrong, key=lambda name: orders.get(self._watched_owner(name), -1))
        if place is not None:
            before = [n for n in first if orders.get(self._watched_owner(n), -1) < place.order]
            if not before:
                return Fault(
                    phase=Phase.BACKWARD,
                    module=place.module,
                    suspects=place.suspects,
                    why=place.why,
                )
            first = before
        if not wrong:
            what = "loss" if "loss" in failed else "count of tokens"
            return Fault(
                phase=Phase.FORWARD,
                module="loss",
                why=f"no module's output differs, the reported {what} does",
            )
        common = {
            round(times, 6) for n in wrong if (times := self.readings.factors.get(n)) is not None
        }
        total = num_trained(self.readings.reference)
        missing_some = any(map(math.isinf, wrong.values()))
        whole = len(wrong) > 0.9 * total and (total > 1 or len(common) == 1)
        if place is None and whole and not missing_some:
            times = f"{common.pop():.6g} times what it should be" if len(common) == 1 else "wrong"
            return Fault(
                phase=Phase.BACKWARD,
                module="gradient reduction",
                suspects=tuple(dict.fromkeys(map(self._watched_owner, first)))[:SHOWN],
                why=f"every gradient is {times}, what flows back through the modules is right",
            )
        suspects = [*dict.fromkeys(self._watched_owner(name) for name in first)]
        return Fault(
            phase=Phase.BACKWARD,
            module=suspects[0],
            suspects=tuple(suspects[1:SHOWN]),
            why=f"the gradient of {first[0]} is wrong, that at its output is not",
        )

    def _micro_batches_differ(self) -> bool:
        mine, its = self.readings.candidate, self.readings.reference
        return num_micro_batches(mine) != num_micro_batches(its)

    def _watched_owner(self, parameter: str) -> str:
        """The innermost module that is called and holds a parameter; one that is never called, such
        as an output layer whose weight the loss takes, or a mere collection, is not watched."""
        module = owner(parameter)
        known = {key.partition("|")[0] for key in self.expected_trace.forward}
        while module and module not in known:
            module = module.rpartition(".")[0]
        return module or owner(parameter)

    def _at_parameters(self, check: str, phase: Phase, why: str) -> Fault:
        wrong = self.wrong[check]
        worst = sorted(wrong, key=wrong.__getitem__, reverse=True)
        suspects = [*dict.fromkeys(map(owner, worst))]
        return Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:SHOWN]), why=why)
