"""Decide whether the plugins under test, and the model, were exercised by the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ascend_run.tools.verify.compare.verdict import Case, Exercise

from .dropout import has_dropout
from .left_out import LeftOut
from .questions import Side
from .sides import Sides

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record

Run = Callable[[Side], "list[Record]"]
"""Returns the records of a run without faults, by rank; cached."""


def runs_without(sides: Sides) -> list[Side]:
    """Return the runs that are only executed to show whether the plugins under test act."""
    found = [side for left_out in sides.left_out for side in (left_out.with_it, left_out.without)]
    return [side for side in found if side is not None and side.only_steps]


def cases(
    sides: Sides, candidate: list[Record], in_training_precision: list[Record] | None
) -> list[Case]:
    """Return the hard cases of the model and its batches, and whether they occurred."""
    from .compare import cases as compared

    config = sides.candidate.prepare().config
    skipped = None
    if in_training_precision is not None and _trains_in(sides) == "fp16":
        skipped = sum(record.cases.skipped for record in in_training_precision)
    setting = compared.Setting(
        has_dropout=any((sides.with_dropout, sides.masks, _drops(sides.resumable))),
        ties_weights=bool(config.model.share_embeddings_and_output_weights),
        skipped=skipped,
        built_in=sides.candidate.uses_kit_batches,
        clip_grad=config.optimizer.clip_grad,
    )
    return [*compared.cases(candidate, setting)]


def exercises(sides: Sides, candidate: list[Record], run: Run) -> Iterator[Exercise]:
    """Yield the plugins under test, and the gradients of the model if they are zero.

    Args:
        candidate: Records of the candidate.
        run: Executes further runs.
    """
    from .compare.results import zero_gradients

    for left_out in sides.left_out:
        if left_out.idle is not None:
            why = f"it is idle where {left_out.idle}: {left_out.idle.why}"
            yield Exercise(
                subject=left_out.plugin, exercised=False, why=why.strip(": "), fix=left_out.fix
            )
        else:
            mine = candidate if left_out.with_it is sides.candidate else run(left_out.with_it)
            yield _exercise(left_out, mine, run, sides.plain)
    zero, total = zero_gradients(candidate)
    if 2 * zero > total:
        yield Exercise(
            subject="gradients",
            exercised=False,
            why=f"{zero} of {total} trained parameters only have gradients that are zero",
            fix="initialize the weights with model.init_method_std above 0",
        )


def _exercise(left_out: LeftOut, mine: Sequence[Record], run: Run, plain: Side) -> Exercise:
    from .compare.effects import effects, effects_of_need

    if left_out.without is None:
        found = effects_of_need(mine, run(plain))
        evidence: tuple[str, ...] = ()
        if found.evidence:
            evidence = ("this layout does not run without it", *found.evidence)
    else:
        found = effects(mine, run(left_out.without))
        evidence = found.evidence
    if evidence:
        return Exercise(subject=left_out.plugin, exercised=True, effects=evidence)
    why = "the same run without it computes the same, by the same operations"
    return Exercise(
        subject=left_out.plugin,
        exercised=False,
        why="; ".join([why, *found.calls]),
        fix=left_out.fix,
    )


def _drops(side: Side | None) -> bool:
    return side is not None and has_dropout(side)


def _trains_in(sides: Sides) -> str:
    return "" if sides.training_precision is None else sides.training_precision.name
