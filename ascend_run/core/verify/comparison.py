"""One run against another: what differs, by how much, and where it begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from . import modules
from .record import Record
from .thresholds import FLOAT32_EPS, FLOAT64_EPS, GRADIENT, MODULE, QUIET, TRAINED
from .verdict import Check, Fault, ModuleDeviation, Phase
from .wholes import Wholes, assemble, distance, factor

_SHOWN = 20


@attrs.frozen(kw_only=True)
class Comparison:
    """A candidate against one reference."""

    checks: tuple[Check, ...]
    fault: Fault | None
    same_bits: bool
    modules: tuple[ModuleDeviation, ...]


def compare(
    candidate: Sequence[Record],
    reference: Sequence[Record],
    *,
    against: str,
    exact: bool = False,
    same_layout: bool = False,
) -> Comparison:
    """
    Args:
        against: The reference in words.
        exact: Every bit must be equal.
        same_layout: Rank for rank the runs draw the same random numbers.
    """
    work = _Comparing(candidate, reference, against, exact)
    checks = [*work.checks(same_layout)]
    failed = {check.name for check in checks if not check.passed}
    found = work.locate(failed) if failed else None
    return Comparison(
        checks=tuple(checks),
        fault=found,
        same_bits=work.same_bits,
        modules=modules.deviations(work.trace, work.expected_trace),
    )


class _Comparing:
    def __init__(
        self, candidate: Sequence[Record], reference: Sequence[Record], against: str, exact: bool
    ) -> None:
        self.candidate, self.reference = candidate, reference
        self.against, self.exact = against, exact
        self.same_bits = True
        self.expected_trace = modules.trace(reference)
        self.trace = modules.aligned(modules.trace(candidate), self.expected_trace)
        self.wrong: dict[str, dict[str, float]] = {}
        """Check -> parameter -> distance, of those above the tolerance."""
        self.factors: dict[str, float | None] = {}
        self.steps = len(reference[0].weights)
        self.first = len(reference[0].losses) - self.steps + 1
        """The first step after which weights were kept."""

    def checks(self, same_layout: bool) -> Iterator[Check]:
        yield self._tensors("initial weights", lambda r: r.initial, 0.0, FLOAT64_EPS)
        yield self._counts()
        yield self._numbers("loss", lambda r: [r.loss], GRADIENT, FLOAT64_EPS)
        yield self._tensors("gradients", lambda r: r.gradients, GRADIENT, FLOAT64_EPS)
        yield self._numbers("losses", lambda r: r.losses, TRAINED, FLOAT32_EPS)
        yield self._numbers("gradient norms", lambda r: r.grad_norms, TRAINED, FLOAT32_EPS)
        for step in range(self.steps):
            yield self._tensors(
                f"weights after step {self.first + step}",
                _weights_after(step),
                TRAINED,
                FLOAT32_EPS,
            )
        if same_layout:
            yield self._generators()

    def _tensors(
        self,
        name: str,
        read: Callable[[Record], Sequence[Tensor | None]],
        tolerance: float,
        eps: float,
    ) -> Check:
        trained = name != "initial weights"
        result = assemble(self.candidate, read, trained=trained)
        expected = assemble(self.reference, read, trained=trained)
        allowed = 0.0 if self.exact else tolerance
        sizes = [float(t.abs().max()) for t in expected.tensors.values() if t.numel()]
        quiet = QUIET * max(sizes, default=0.0)
        wrong: dict[str, float] = {}
        details: list[str] = [*_incomplete(result)]
        worst, where = 0.0, ""
        for key in [*expected.tensors, *(result.tensors.keys() - expected.tensors.keys())]:
            if key not in result.tensors:
                apart, said = math.inf, "is missing, or does not train"
            elif key not in expected.tensors:
                apart, said = math.inf, "is not there without"
            else:
                apart = distance(result.tensors[key], expected.tensors[key], quiet)
                said = f"is off by {apart:.2e} of its largest value ({apart / eps:.3g} eps)"
                if apart > allowed and name == "gradients":
                    self.factors[key] = factor(result.tensors[key], expected.tensors[key])
                    if self.factors[key] is not None:
                        said += f"; it is {self.factors[key]:.6g} times what it should be"
            if apart > worst:
                worst, where = apart, key
            if apart > allowed:
                wrong[key] = apart
                details.append(f"{key} {said}")
        self.same_bits &= worst == 0.0 and not details
        for key in result.unheld | dict.fromkeys(name for _, name in result.missing):
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
            details=_shortened(details),
        )

    def _numbers(
        self, name: str, read: Callable[[Record], Sequence[float]], tolerance: float, eps: float
    ) -> Check:
        allowed = 0.0 if self.exact else tolerance
        worst, where, details = 0.0, "", []
        expected = read(self.reference[-1])
        for record in self.candidate:
            for step, (got, want) in enumerate(zip(read(record), expected, strict=True)):
                apart = 0.0 if got == want else abs(got - want) / abs(want) if want else math.inf
                if math.isnan(apart):
                    apart = 0.0 if math.isnan(got) and math.isnan(want) else math.inf
                if apart > worst:
                    worst, where = apart, f"step {step + 1} on rank {record.rank}"
                if apart > allowed:
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
            details=_shortened(details),
        )

    def _counts(self) -> Check:
        """Tokens and micro-batches are counted, so they are equal or wrong."""
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
        total, expected = _samples(self.candidate), _samples(self.reference)
        if total not in (expected, 0):  # a schedule of its own may call a model's parts
            details.append(f"{total} micro-batches were run, expected {expected}")
        return Check(
            name="counts",
            against=self.against,
            passed=not details,
            worst=math.inf if details else 0.0,
            details=_shortened(details),
        )

    def _generators(self) -> Check:
        details = [
            f"rank {mine.rank}: {name} stands elsewhere"
            for mine, its in zip(self.candidate, self.reference, strict=True)
            for name in sorted(mine.generators.keys() | its.generators.keys())
            if mine.generators.get(name) != its.generators.get(name)
        ]
        return Check(
            name="random streams",
            against=self.against,
            passed=not details,
            details=_shortened(details),
        )

    def locate(self, failed: set[str]) -> Fault:
        """Where it begins; called where something has failed."""
        if self.wrong["initial weights"]:
            return self._at_parameters("initial weights", Phase.FORWARD, "it starts from others")
        if failed & {"counts", "loss", "gradients"}:
            return self._in_the_model(failed)
        for step in range(self.steps):
            wrong = self.wrong[f"weights after step {self.first + step}"]
            if wrong:
                why = f"gradients are right, weights after step {self.first + step} are not"
                total = _num_names(self.reference)
                if 2 * len(wrong) > total and not any(map(math.isinf, wrong.values())):
                    worst = sorted(wrong, key=wrong.__getitem__, reverse=True)
                    return Fault(
                        phase=Phase.OPTIMIZER,
                        module="optimizer",
                        suspects=tuple(map(owner, worst))[:_SHOWN],
                        why=f"{why}, of {len(wrong)} tensors",
                    )
                name = f"weights after step {self.first + step}"
                return self._at_parameters(name, Phase.OPTIMIZER, why)
        if "gradient norms" in failed:
            return Fault(phase=Phase.OPTIMIZER, module="gradient norm", why="it alone differs")
        if "losses" in failed:
            return Fault(phase=Phase.FORWARD, module="loss", why="it alone differs")
        return Fault(
            phase=Phase.FORWARD, module="random streams", why="a generator stands elsewhere"
        )

    def _in_the_model(self, failed: set[str]) -> Fault:
        tolerance = 0.0 if self.exact else MODULE
        missing = _samples(self.candidate) not in (_samples(self.reference), 0)
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
        common = {round(times, 6) for n in wrong if (times := self.factors.get(n)) is not None}
        total = _num_names(self.reference)
        missing_some = any(map(math.isinf, wrong.values()))
        whole = len(wrong) > 0.9 * total and (total > 1 or len(common) == 1)
        if place is None and whole and not missing_some:
            times = f"{common.pop():.6g} times what it should be" if len(common) == 1 else "wrong"
            return Fault(
                phase=Phase.BACKWARD,
                module="gradient reduction",
                suspects=tuple(dict.fromkeys(map(self._watched_owner, first)))[:_SHOWN],
                why=f"every gradient is {times}, what flows back through the modules is right",
            )
        suspects = [*dict.fromkeys(self._watched_owner(name) for name in first)]
        return Fault(
            phase=Phase.BACKWARD,
            module=suspects[0],
            suspects=tuple(suspects[1:_SHOWN]),
            why=f"the gradient of {first[0]} is wrong, that at its output is not",
        )

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
        return Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:_SHOWN]), why=why)


def owner(parameter: str) -> str:
    """The module that a parameter belongs to."""
    module = parameter.rpartition(".")[0]
    # Linears of experts are listed one by one, and computed in one.
    head, experts, _ = module.partition(".experts.")
    return f"{head}.experts" if experts else module


def _weights_after(step: int) -> Callable[[Record], Sequence[Tensor | None]]:
    return lambda record: record.weights[step]


def _incomplete(whole: Wholes) -> Iterator[str]:
    for name, count in whole.unheld.items():
        yield f"{name}: no rank holds {count} of its elements"
    for rank, name in whole.missing:
        yield f"rank {rank}: {name} got no gradient"


def _samples(records: Sequence[Record]) -> int:
    """Micro-batches over the data-parallel ranks."""
    counts: Mapping[int, int] = {r.coordinates["dp"]: r.micro_batches for r in records}
    return sum(counts.values())


def _num_names(records: Sequence[Record]) -> int:
    return len({place.name for record in records for place in record.places if place.trains})


def _shortened(details: Sequence[str]) -> tuple[str, ...]:
    more = len(details) - _SHOWN
    return (*details[:_SHOWN], f"and {more} more") if more > 0 else tuple(details)
