"""A run in half precision against the float64 and float32 one, beside what rounding alone does.

Two right runs in half precision lie as far apart as their rounding takes them, by a model's depth
and width. So each is held against the exact run, and the candidate may lie some times further from
it than the reference does. Distances are ``|a - b| / |b|`` of whole tensors in the Euclidean norm:
the largest element of a rounded tensor is left to chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from .comparison import compare
from .readings import SHOWN, num_micro_batches, shortened
from .record import Record
from .replicas import replicas, tied
from .thresholds import OWN_EPS, OWN_TIMES
from .training import copied, frozen
from .verdict import Check, Fault, Phase
from .wholes import Read, assemble, owner


def compare_own(
    candidate: Sequence[Record],
    reference: Sequence[Record],
    exact: Sequence[Record],
    *,
    against: str,
    precision: str,
    bitwise: bool,
) -> tuple[list[Check], Fault | None]:
    """Every check, and where the first that failed points.

    Args:
        candidate: Made in ``precision``, as is ``reference``.
        exact: The plain run in float64 and float32.
        against: The reference in words.
        precision: ``bf16`` or ``fp16``.
        bitwise: The candidate must equal the reference in every bit.
    """
    found = [replicas(candidate), tied(candidate), frozen(candidate), copied(candidate)]
    if bitwise:
        equal = compare(candidate, reference, against=against, exact=True, same_layout=True)
        found += [(check, None if check.passed else equal.fault) for check in equal.checks]
    else:
        found += _Own(candidate, reference, exact, against, precision).checks()
    checks = [attrs.evolve(check, name=f"{check.name}, {precision}") for check, _ in found]
    return checks, next((fault for _, fault in found if fault is not None), None)


class _Own:
    def __init__(
        self,
        candidate: Sequence[Record],
        reference: Sequence[Record],
        exact: Sequence[Record],
        against: str,
        precision: str,
    ) -> None:
        self.candidate, self.reference, self.exact = candidate, reference, exact
        self.against, self.precision, self.eps = against, precision, OWN_EPS[precision]

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
            return num_micro_batches(records), first.num_tokens, *first.step_tokens

        got, want = counted(self.candidate), counted(self.exact)
        details = [] if got == want else [f"micro-batches and tokens are {got}, expected {want}"]
        fault = Fault(phase=Phase.FORWARD, module="schedule", why=" ".join(details))
        return self._check("counts", 0.0, 0.0, "", details), fault if details else None

    def _numbers(
        self, name: str, phase: Phase, read: Callable[[Record], Sequence[float]]
    ) -> tuple[Check, Fault | None]:
        found = [read(records[-1]) for records in (self.candidate, self.reference, self.exact)]
        apart = {
            f"step {step + 1}": (_relative(got, want), _relative(its, want))
            for step, (got, its, want) in enumerate(zip(*found, strict=True))
        }
        check, wrong = self._judged(name, apart)
        module = "gradient norm" if name == "gradient norms" else "loss"
        fault = Fault(phase=phase, module=module, why="it is off by more than rounding")
        return check, fault if wrong else None

    def _tensors(self, name: str, phase: Phase, read: Read) -> tuple[Check, Fault | None]:
        mine, its, exact = (
            assemble(records, read) for records in (self.candidate, self.reference, self.exact)
        )
        apart = {
            key: (_distance(mine.tensors.get(key), want), _distance(its.tensors.get(key), want))
            for key, want in exact.tensors.items()
        }
        check, wrong = self._judged(name, apart, [*mine.incomplete()])
        if not wrong:
            return check, None
        suspects = tuple(dict.fromkeys(map(owner, wrong)))
        why = f"in {self.precision}, {name} lie further off than rounding takes them"
        return check, Fault(phase=phase, module=suspects[0], suspects=suspects[1:SHOWN], why=why)

    def _judged(
        self, name: str, apart: Mapping[str, tuple[float, float]], details: Sequence[str] = ()
    ) -> tuple[Check, list[str]]:
        """The check, and what is wrong, the worst first."""
        usual = statistics.median([its for _, its in apart.values()] or [0.0])
        least = max(self.eps, usual if math.isfinite(usual) else 0.0)
        ratios = {
            key: got / max(least, its) if math.isfinite(its) else 0.0
            for key, (got, its) in apart.items()
        }
        wrong = sorted(
            (key for key, ratio in ratios.items() if ratio > OWN_TIMES),
            key=ratios.__getitem__,
            reverse=True,
        )
        worst = max(apart, key=ratios.__getitem__, default="")
        told = [
            f"{key} lies {apart[key][0]:.2e} from the exact run, the reference {apart[key][1]:.2e}"
            for key in wrong
        ]
        reached = apart[worst][0] if apart else 0.0
        check = self._check(name, reached, OWN_TIMES * least, worst, [*details, *told])
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


def _distance(result: Tensor | None, exact: Tensor) -> float:
    if result is None or result.shape != exact.shape:
        return math.inf
    scale = float(exact.double().norm())
    apart = float((result.double() - exact.double()).norm())
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale > 0 else (0.0 if apart == 0 else math.inf)


def _relative(result: float, exact: float) -> float:
    apart = abs(result - exact)
    if not math.isfinite(apart):
        return math.inf
    return apart / abs(exact) if exact else (0.0 if apart == 0 else math.inf)
