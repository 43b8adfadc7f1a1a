"""Compare half-precision runs through their errors relative to the float64 and float32 run.

Two correct runs in half precision differ by rounding errors that grow with the model's depth and
width. Therefore each of them is compared with the exact run, and the candidate's error may exceed
the reference's by a constant factor. Errors are ``|a - b| / |b|`` of full tensors in the Euclidean
norm, because the max error of a rounded tensor varies randomly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from ascend_run.tools.verify.capture.record import Record

from .comparison import compare
from .full_tensors import Read, assemble, owner
from .readings import SHOWN, num_microbatches, shortened
from .replicas import replica_checks
from .skipped_steps import skipped
from .thresholds import HALF_PRECISION_EPS, HALF_PRECISION_FACTOR
from .training import copied, frozen
from .verdict import Check, Fault, Phase


def compare_in_training_precision(
    candidate: Sequence[Record],
    reference: Sequence[Record],
    exact: Sequence[Record],
    *,
    against: str,
    precision: str,
    bitwise: bool,
) -> tuple[list[Check], Fault | None]:
    """Return all checks, and the fault that the first failed one indicates.

    Args:
        candidate: Run in ``precision``, like ``reference``.
        exact: The plain run in float64 and float32.
        against: Name of the reference.
        precision: ``bf16`` or ``fp16``.
        bitwise: Whether the candidate must be bitwise equal to the reference.
    """
    found = [*replica_checks(candidate), frozen(candidate), copied(candidate), skipped(candidate)]
    if bitwise:
        equal = compare(candidate, reference, against=against, exact=True, same_layout=True)
        found += [(check, None if check.passed else equal.fault) for check in equal.checks]
    else:
        found += _HalfPrecision(candidate, reference, exact, against, precision).checks()
    checks = [attrs.evolve(check, name=f"{check.name}, {precision}") for check, _ in found]
    return checks, next((fault for _, fault in found if fault is not None), None)


class _HalfPrecision:
    def __init__(
        self,
        candidate: Sequence[Record],
        reference: Sequence[Record],
        exact: Sequence[Record],
        against: str,
        precision: str,
    ) -> None:
        self.candidate, self.reference, self.exact = candidate, reference, exact
        self.against, self.precision = against, precision
        self.eps = HALF_PRECISION_EPS[precision]

    def checks(self) -> Iterator[tuple[Check, Fault | None]]:
        yield self._counts()
        yield self._numbers("loss", Phase.FORWARD, lambda r: [r.loss])
        yield self._tensors("gradients", Phase.BACKWARD, lambda r: r.gradients)
        yield self._numbers("losses", Phase.OPTIMIZER, lambda r: r.losses)
        yield self._numbers("gradient norms", Phase.OPTIMIZER, lambda r: r.grad_norms)
        yield self._tensors("weights after the steps", Phase.OPTIMIZER, lambda r: r.weights[-1])

    def _counts(self) -> tuple[Check, Fault | None]:
        def counted(records: Sequence[Record]) -> tuple[int, ...]:
            first = records[-1]
            return num_microbatches(records), first.num_tokens, *first.step_tokens

        got, want = counted(self.candidate), counted(self.exact)
        details = [] if got == want else [f"micro-batches and tokens are {got}, expected {want}"]
        fault = Fault(phase=Phase.FORWARD, module="schedule", why=" ".join(details))
        return self._check("counts", 0.0, 0.0, "", details), fault if details else None

    def _numbers(
        self, name: str, phase: Phase, read: Callable[[Record], Sequence[float]]
    ) -> tuple[Check, Fault | None]:
        found = [read(records[-1]) for records in (self.candidate, self.reference, self.exact)]
        errors = {
            f"step {step + 1}": (_number_error(got, exact), _number_error(reference, exact))
            for step, (got, reference, exact) in enumerate(zip(*found, strict=True))
        }
        check, wrong = self._judged(name, errors)
        module = "gradient norm" if name == "gradient norms" else "loss"
        fault = Fault(phase=phase, module=module, why="its error is larger than rounding errors")
        return check, fault if wrong else None

    def _tensors(self, name: str, phase: Phase, read: Read) -> tuple[Check, Fault | None]:
        result, reference, exact = (
            assemble(records, read) for records in (self.candidate, self.reference, self.exact)
        )
        errors = {
            key: (
                _tensor_error(result.tensors.get(key), tensor),
                _tensor_error(reference.tensors.get(key), tensor),
            )
            for key, tensor in exact.tensors.items()
        }
        check, wrong = self._judged(name, errors, [*result.incomplete()])
        if not wrong:
            return check, None
        suspects = tuple(dict.fromkeys(map(owner, wrong)))
        why = f"in {self.precision}, the error of {name} is larger than rounding errors"
        return check, Fault(phase=phase, module=suspects[0], suspects=suspects[1:SHOWN], why=why)

    def _judged(
        self, name: str, errors: Mapping[str, tuple[float, float]], details: Sequence[str] = ()
    ) -> tuple[Check, list[str]]:
        """Return the check, and the names that failed, the worst first.

        Args:
            errors: Name -> error of the candidate, error of the reference.
        """
        median = statistics.median([reference for _, reference in errors.values()] or [0.0])
        least = max(self.eps, median if math.isfinite(median) else 0.0)
        ratios = {
            key: error / max(least, reference) if math.isfinite(reference) else 0.0
            for key, (error, reference) in errors.items()
        }
        wrong = sorted(
            (key for key, ratio in ratios.items() if ratio > HALF_PRECISION_FACTOR),
            key=ratios.__getitem__,
            reverse=True,
        )
        worst = max(errors, key=ratios.__getitem__, default="")
        described = [
            f"{key} has error {errors[key][0]:.2e} relative to the exact run, the reference "
            f"{errors[key][1]:.2e}"
            for key in wrong
        ]
        largest = errors[worst][0] if errors else 0.0
        tolerance = HALF_PRECISION_FACTOR * least
        check = self._check(name, largest, tolerance, worst, [*details, *described])
        return check, wrong or [line.partition(":")[0] for line in details]

    def _check(
        self, name: str, worst: float, tolerance: float, where: str, details: Sequence[str]
    ) -> Check:
        return Check(
            name=name,
            against=self.against,
            passed=not details,
            worst=worst,
            eps=worst / self.eps,
            tolerance=tolerance,
            where=where,
            details=shortened(details),
        )


def _tensor_error(result: Tensor | None, exact: Tensor) -> float:
    if result is None or result.shape != exact.shape:
        return math.inf
    scale = float(exact.double().norm())
    error = float((result.double() - exact.double()).norm())
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale > 0 else (0.0 if error == 0 else math.inf)


def _number_error(result: float, exact: float) -> float:
    error = abs(result - exact)
    if not math.isfinite(error):
        return math.inf
    return error / abs(exact) if exact else (0.0 if error == 0 else math.inf)
