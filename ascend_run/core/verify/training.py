"""What should train moved, and what should not is where it was, in every bit.

Which parameters these are is ``Place.is_trained``: where a plugin declares one thing and the run
does another, the declaration counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from .record import Place, Record
from .thresholds import ADAM_EPSILON, FLOAT32_EPS, LEARNING_RATE, VISIBLE
from .verdict import ITSELF, Check, Fault, Phase
from .wholes import owner


@attrs.define(kw_only=True)
class _Motion:
    """Of one parameter over all ranks."""

    moved: bool = False
    """Any part of it."""
    asks: bool = False
    """For a gradient, on any rank."""
    peak: float = -1.0
    """Its largest gradient."""
    largest: float = 0.0
    """Element, before the steps."""

    @property
    def must_show(self) -> bool:
        """Whether the step that Adam makes of its gradient is far above a weight's rounding."""
        step = LEARNING_RATE * self.peak / (self.peak + ADAM_EPSILON) if self.peak > 0 else 0.0
        return step > VISIBLE * FLOAT32_EPS * self.largest


def moved(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> tuple[Check, Fault | None]:
    """Every parameter that should train had a gradient and is elsewhere after the steps.

    Args:
        reference: What does not move there either is not held against this run, unless its
            gradient was large enough that it must.
    """
    motions = _motions(records, wanted=True)
    others = {} if reference is None else _motions(reference, wanted=True)
    wrong: dict[str, str] = {}
    for name, motion in motions.items():
        other = others.get(name)
        if not motion.asks:
            wrong[name] = "should train, and asks for no gradient"
        elif not motion.moved and (other is None or other.moved or motion.must_show):
            wrong[name] = f"trains, and did not move ({_said(motion.peak)})"
        # Weight decay moves what has no gradient.
        elif motion.peak <= 0.0 and (other is None or other.peak > 0.0):
            wrong[name] = f"trains, and {_said(motion.peak)}"
    phase = (
        Phase.OPTIMIZER
        if all(motions[name].asks and motions[name].peak > 0.0 for name in wrong)
        else Phase.BACKWARD
    )
    told = "parameters do not train"
    return _verdict("parameters that must move", wrong, owner(next(iter(wrong), "")), phase, told)


def frozen(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """What should not train is where it was."""
    motions = _motions(records, wanted=False)
    wrong = {
        name: "is declared frozen, and trains" if motion.asks else "does not train, and moved"
        for name, motion in motions.items()
        if motion.moved
    }
    # Most of them at once are no module's fault, but of what is handed to the optimizer.
    most = len(wrong) > 1 and 2 * len(wrong) > len(motions)
    module = "optimizer" if most else owner(next(iter(wrong), ""))
    told = "parameters that should not train have moved"
    return _verdict("parameters that must not move", wrong, module, Phase.OPTIMIZER, told)


def copied(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Every parameter is what the optimizer has stepped in its place."""
    wrong = {
        name: f"is not what the optimizer has on rank {record.rank}"
        for record in records
        for name in record.stale
    }
    told = "what the optimizer has stepped did not come back to the model"
    module = owner(next(iter(wrong), "")) if len(wrong) == 1 else "optimizer"
    return _verdict("weights as stepped", wrong, module, Phase.OPTIMIZER, told)


def _motions(records: Sequence[Record], *, wanted: bool) -> Mapping[str, _Motion]:
    """Of the parameters that should train, or of those that should not."""
    found: dict[str, _Motion] = {}
    for record, index, place in _held(records):
        if place.is_trained is not wanted:
            continue
        motion = found.setdefault(place.name, _Motion())
        before, after = record.initial[index], record.weights[-1][index]
        motion.moved |= not torch.equal(before.to(after.dtype), after)
        motion.asks |= place.trains
        motion.peak = max(motion.peak, record.peaks[index])
        motion.largest = max(motion.largest, float(before.abs().max()))
    return found


def _held(records: Sequence[Record]) -> Iterator[tuple[Record, int, Place]]:
    for record in records:
        for index, place in enumerate(record.places):
            if record.weights and record.initial[index].numel():
                yield record, index, place


def _said(peak: float) -> str:
    return "never had a gradient" if peak < 0 else f"its largest gradient was {peak:.1e}"


def _verdict(
    name: str, wrong: Mapping[str, str], module: str, phase: Phase, why: str
) -> tuple[Check, Fault | None]:
    if not wrong:
        return Check(name=name, against=ITSELF, passed=True), None
    check = Check(
        name=name,
        against=ITSELF,
        passed=False,
        where=next(iter(wrong)),
        details=tuple(f"{parameter} {said}" for parameter, said in wrong.items())[:20],
    )
    suspects = [owner(parameter) for parameter in wrong if owner(parameter) != module]
    return check, Fault(
        phase=phase, module=module, suspects=tuple(dict.fromkeys(suspects))[:19], why=why
    )
