"""Check that trained parameters change and frozen parameters stay bitwise equal.

Which parameters are trained is ``RecordedShard.is_trained``: if the run does not match a plugin's
declaration, the declaration counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from ascend_run.tools.verify.capture.record import Record, RecordedShard

from .full_tensors import owner
from .thresholds import ADAM_EPSILON, FLOAT32_EPS, LEARNING_RATE, VISIBLE
from .verdict import FROZEN_CHANGED, ITSELF, Check, Fault, Phase


@attrs.define(kw_only=True)
class _Motion:
    """Change of one parameter over all ranks."""

    moved: bool = False
    """Whether any element changed."""
    requires_grad: bool = False
    """Whether it requires a gradient on any rank."""
    peak: float = -1.0
    """Its largest gradient."""
    largest: float = 0.0
    """Its largest element before the steps."""
    rate: float = LEARNING_RATE
    """The highest learning rate of its steps."""

    @property
    def must_show(self) -> bool:
        """Whether Adam's update for its gradient is well above the weights' rounding."""
        step = self.rate * self.peak / (self.peak + ADAM_EPSILON) if self.peak > 0 else 0.0
        return step > VISIBLE * FLOAT32_EPS * self.largest


def moved(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> tuple[Check, Fault | None]:
    """Check that every parameter that should train had a gradient and changed.

    Args:
        reference: A parameter that does not change there either is not a fault, unless its gradient
            is large enough.
    """
    motions = _motions(records, wanted=True)
    others = {} if reference is None else _motions(reference, wanted=True)
    wrong: dict[str, str] = {}
    for name, motion in motions.items():
        other = others.get(name)
        if not motion.requires_grad:
            wrong[name] = "should train, but does not require a gradient"
        elif not motion.moved and (other is None or other.moved or motion.must_show):
            wrong[name] = f"trains, but did not change ({_gradient_size(motion.peak)})"
        # Weight decay changes parameters without a gradient.
        elif motion.peak <= 0.0 and (other is None or other.peak > 0.0):
            wrong[name] = f"trains, but {_gradient_size(motion.peak)}"
    phase = (
        Phase.OPTIMIZER
        if all(motions[name].requires_grad and motions[name].peak > 0.0 for name in wrong)
        else Phase.BACKWARD
    )
    why = "parameters do not train"
    module = owner(next(iter(wrong), ""))
    return _verdict("trained parameters", wrong, module, phase, why, applies=bool(motions))


def frozen(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Check that parameters that should not train did not change."""
    motions = _motions(records, wanted=False)
    wrong = {
        name: "is declared frozen, but trains"
        if motion.requires_grad
        else "does not train, but changed"
        for name, motion in motions.items()
        if motion.moved
    }
    # If most of them changed, the cause is the optimizer's parameters rather than a module.
    most = len(wrong) > 1 and 2 * len(wrong) > len(motions)
    module = "optimizer" if most else owner(next(iter(wrong), ""))
    why = FROZEN_CHANGED
    return _verdict("frozen parameters", wrong, module, Phase.OPTIMIZER, why, applies=bool(motions))


def copied(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Check that every parameter is equal to its master weights."""
    wrong = {
        name: f"differs from its master weights on rank {record.rank}"
        for record in records
        for name in record.stale
    }
    why = "master weights were not copied to the model weights"
    module = owner(next(iter(wrong), "")) if len(wrong) == 1 else "optimizer"
    applies = any(record.num_masters for record in records)
    return _verdict("master weights", wrong, module, Phase.OPTIMIZER, why, applies=applies)


def _motions(records: Sequence[Record], *, wanted: bool) -> Mapping[str, _Motion]:
    """Name -> change, for the parameters that should train or for those that should not."""
    found: dict[str, _Motion] = {}
    for record, index, place in _held(records):
        if place.is_trained is not wanted:
            continue
        motion = found.setdefault(place.name, _Motion())
        before, after = record.initial[index], record.weights[-1][index]
        motion.moved |= not torch.equal(before.to(after.dtype), after)
        motion.requires_grad |= place.trains
        if place.name in record.rates:
            motion.rate = max(record.rates[place.name][1:])
        motion.peak = max(motion.peak, record.peaks[index])
        motion.largest = max(motion.largest, float(before.abs().max()))
    return found


def _held(records: Sequence[Record]) -> Iterator[tuple[Record, int, RecordedShard]]:
    for record in records:
        for index, place in enumerate(record.places):
            if record.weights and record.initial[index].numel():
                yield record, index, place


def _gradient_size(peak: float) -> str:
    return "never had a gradient" if peak < 0 else f"its largest gradient was {peak:.1e}"


def _verdict(
    name: str, wrong: Mapping[str, str], module: str, phase: Phase, why: str, *, applies: bool
) -> tuple[Check, Fault | None]:
    if not wrong:
        return Check(name=name, against=ITSELF, passed=True, applies=applies), None
    check = Check(
        name=name,
        against=ITSELF,
        passed=False,
        where=next(iter(wrong)),
        details=tuple(f"{parameter} {what}" for parameter, what in wrong.items())[:20],
    )
    suspects = [owner(parameter) for parameter in wrong if owner(parameter) != module]
    return check, Fault(
        phase=phase, module=module, suspects=tuple(dict.fromkeys(suspects))[:19], why=why
    )
