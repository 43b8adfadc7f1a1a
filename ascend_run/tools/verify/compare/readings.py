"""Compare the recorded tensors and numbers of two runs; ``locating`` finds the origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from ascend_run.testing.tensors import relative_error
from ascend_run.tools.verify.capture.record import Record

from .full_tensors import Read, assemble, factor
from .groups import GROUPS, compare_groups
from .thresholds import (
    FLOAT32_EPS,
    FLOAT64_EPS,
    FROM_ZERO,
    GRADIENT,
    LEARNING_RATE,
    QUIET,
    TRAINED,
)
from .verdict import Check

SHOWN = 20
"""Maximum number of details and suspects shown per check."""


class Readings:
    """Compares everything that was recorded, and stores what was wrong for ``locating``."""

    def __init__(
        self, candidate: Sequence[Record], reference: Sequence[Record], against: str, exact: bool
    ) -> None:
        self.candidate, self.reference = candidate, reference
        self.against, self.exact = against, exact
        self.same_bits = True
        self.wrong: dict[str, dict[str, float]] = {}
        """Check -> parameter, or ``step N`` -> error, if it is above the tolerance."""
        self.factors: dict[str, float | None] = {}
        self.steps = min(len(candidate[0].weights), len(reference[0].weights))
        """The last steps, after which both recorded weights: with ``ddp.overlap_param_gather`` a
        run records those after its last one only."""
        self.first = len(reference[0].losses) - self.steps + 1

    def checks(self, *, same_layout: bool, same_weights: bool) -> Iterator[Check]:
        """Yield every check; arguments as in ``compare``."""
        if not same_weights:
            yield self._tensors("initial weights", lambda r: r.initial, 0.0, FLOAT64_EPS)
        yield self._counts()
        yield self._numbers("loss", lambda r: [r.loss], GRADIENT, FLOAT64_EPS)
        yield self._tensors("gradients", lambda r: r.gradients, GRADIENT, FLOAT64_EPS)
        yield self._numbers("losses", lambda r: r.losses, TRAINED, FLOAT32_EPS)
        yield self._numbers("gradient norms", lambda r: r.grad_norms, TRAINED, FLOAT32_EPS)
        if any(record.rates for record in (*self.candidate, *self.reference)):
            check, self.wrong[GROUPS] = compare_groups(self.candidate, self.reference, self.against)
            yield check
        for step in range(self.steps):
            yield self._tensors(
                weights_after(self.first + step),
                _read_weights(step - self.steps),
                TRAINED,
                FLOAT32_EPS,
                FROM_ZERO * LEARNING_RATE * (self.first + step),
            )
        if same_layout:
            yield self._generators()

    def _tensors(
        self, name: str, read: Read, tolerance: float, eps: float, least: float = 0.0
    ) -> Check:
        """Compare a tensor of each parameter.

        Args:
            least: Errors are relative to this size at least.
        """
        trained = name != "initial weights"
        result = assemble(self.candidate, read, trained=trained)
        expected = assemble(self.reference, read, trained=trained)
        allowed = 0.0 if self.exact else tolerance
        tolerated = f" (tolerance {allowed:.0e})" if allowed else ""
        sizes = [float(t.abs().max()) for t in expected.tensors.values() if t.numel()]
        quiet = max(least, QUIET * max(sizes, default=0.0))
        wrong: dict[str, float] = {}
        details: list[tuple[float, str]] = [(math.inf, line) for line in result.incomplete()]
        if not expected.tensors:
            details.append((math.inf, "the reference has no tensors: nothing to compare with"))
        worst, where = 0.0, ""
        for key in [*expected.tensors, *(result.tensors.keys() - expected.tensors.keys())]:
            if key not in result.tensors:
                error, problem = math.inf, "is missing, or does not train"
            elif key not in expected.tensors:
                error, problem = math.inf, "is not in the reference"
            else:
                error = relative_error(result.tensors[key], expected.tensors[key], quiet)
                problem = f"is wrong by {error:.1e} of the largest value{tolerated}"
                if error > allowed and name == "gradients":
                    self.factors[key] = factor(result.tensors[key], expected.tensors[key])
                    if self.factors[key] is not None:
                        problem += f"; it is {self.factors[key]:.6g} x the expected"
            if error > worst:
                worst, where = error, key
            if error > allowed:
                wrong[key] = error
                details.append((error, f"{key} {problem}"))
        self.same_bits &= worst == 0.0 and not details
        for key in (*result.unheld, *(name for _, name in result.missing)):
            wrong.setdefault(key, math.inf)
        self.wrong[name] = wrong
        return Check(
            name=name,
            against=self.against,
            passed=not details,
            worst=worst,
            eps=worst / eps,
            tolerance=allowed,
            where=where,
            details=shortened([text for _, text in sorted(details, key=_error, reverse=True)]),
        )

    def _numbers(
        self, name: str, read: Callable[[Record], Sequence[float]], tolerance: float, eps: float
    ) -> Check:
        allowed = 0.0 if self.exact else tolerance
        worst, where, details = 0.0, "", []
        wrong = self.wrong.setdefault(name, {})
        expected = read(self.reference[-1])
        for record in self.candidate:
            for step, (got, want) in enumerate(zip(read(record), expected, strict=True)):
                error = 0.0 if got == want else abs(got - want) / abs(want) if want else math.inf
                if math.isnan(error):
                    error = 0.0 if math.isnan(got) and math.isnan(want) else math.inf
                if error > worst:
                    worst, where = error, f"step {step + 1} on rank {record.rank}"
                if error > allowed:
                    wrong[f"step {step + 1}"] = error
                    details.append(
                        f"step {step + 1} on rank {record.rank}: {got!r}, expected {want!r}"
                    )
        self.same_bits &= worst == 0.0
        return Check(
            name=name,
            against=self.against,
            passed=not details,
            worst=worst,
            eps=worst / eps,
            tolerance=allowed,
            where=where,
            details=shortened(details),
        )

    def _counts(self) -> Check:
        """Compare the numbers of tokens and micro-batches, which must be equal."""
        details = []
        first = self.reference[-1]
        for record in self.candidate:
            for what, got, want in (
                ("first batch", record.num_tokens, first.num_tokens),
                *(
                    (f"step {step + 1}", got, want)
                    for step, (got, want) in enumerate(
                        zip(record.step_tokens, first.step_tokens, strict=True)
                    )
                ),
            ):
                if got != want:
                    details.append(
                        f"{what} on rank {record.rank}: {got} trained tokens, expected {want}"
                    )
        total, expected = num_microbatches(self.candidate), num_microbatches(self.reference)
        if total != expected:
            details.append(f"{total} micro-batches were run, expected {expected}")
        if not expected or not first.num_tokens:
            details.append(
                f"the reference ran {expected} micro-batches with {first.num_tokens} trained "
                "tokens: nothing to compare with"
            )
        return Check(
            name="counts",
            against=self.against,
            passed=not details,
            worst=math.inf if details else 0.0,
            details=shortened(details),
        )

    def _generators(self) -> Check:
        details = [
            f"rank {mine.rank}: the state of {name} differs"
            for mine, reference in zip(self.candidate, self.reference, strict=True)
            for name in sorted(mine.generators.keys() | reference.generators.keys())
            if mine.generators.get(name) != reference.generators.get(name)
        ]
        return Check(
            name="random streams",
            against=self.against,
            passed=not details,
            applies=any(record.generators for record in (*self.candidate, *self.reference)),
            details=shortened(details),
        )


def _error(detail: tuple[float, str]) -> float:
    return detail[0]


def weights_after(step: int) -> str:
    """Return the name of a check."""
    return f"weights after step {step}"


def _read_weights(index: int) -> Read:
    """Return a reader of the weights of a step, counted from the last one, which is -1."""
    return lambda record: record.weights[index]


def num_microbatches(records: Sequence[Record]) -> int:
    """Return the number of micro-batches over all data-parallel ranks."""
    counts: Mapping[int, int] = {r.coordinates["dp"]: r.micro_batches for r in records}
    return sum(counts.values())


def num_trained(records: Sequence[Record]) -> int:
    return len({place.name for record in records for place in record.places if place.is_trained})


def shortened(details: Sequence[str]) -> tuple[str, ...]:
    more = len(details) - SHOWN
    return (*details[:SHOWN], f"and {more} more") if more > 0 else tuple(details)
