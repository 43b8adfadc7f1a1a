"""The result of ``diff``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from ascend_run.tools.pages.fingerprint_file import Entry, Fingerprints
from ascend_run.tools.pages.run_differences import Difference
from ascend_run.tools.pages.step_differences import (
    PARTS,
    StepComparison,
    different_parts,
    loss_difference,
    steps_of,
)
from ascend_run.tools.terminal.tables import table

_NAMES = ("A", "B")


@attrs.frozen(kw_only=True)
class Diff:
    """The comparison of two runs."""

    paths: tuple[Path, Path]
    fingerprints: tuple[Fingerprints, Fingerprints]
    steps: StepComparison
    differences: Sequence[Difference]
    problems: tuple[tuple[str, ...], tuple[str, ...]]
    """Missing and corrupt files of each run folder."""


def as_text(diff: Diff, width: int | None = None) -> str:
    """Format for a terminal.

    Args:
        width: Width of the terminal; None: no wrapping.
    """
    return "\n".join(_lines(diff, width))


def _lines(diff: Diff, width: int | None) -> Iterator[str]:
    for name, path, found in zip(_NAMES, diff.paths, diff.fingerprints, strict=True):
        yield f"{name}  {path}: {steps_of(found.entries)}"
    yield ""
    yield from _verdict(diff)
    if diff.steps.first is not None:
        yield ""
        yield from table(_STEP_HEADER, [_row(*pair) for pair in diff.steps.shown])
    yield ""
    if diff.differences:
        yield "what differs between the runs:"
        rows = [_cause(difference) for difference in diff.differences]
        yield from table(("kind", "name", "A", "B", "came from"), rows, width=width, flexible=4)
    else:
        yield "config, plugins, versions, device, data and layout are the same"
    for name, problems in zip(_NAMES, diff.problems, strict=True):
        yield from (f"note: {name}: {problem}" for problem in problems)


def _verdict(diff: Diff) -> Iterator[str]:
    steps = diff.steps
    compared = f"steps {steps.common[0]} to {steps.common[-1]}"
    if steps.missing:
        compared += f" ({steps.missing} of them not in both)"
    if steps.first is None:
        yield f"identical over {compared}"
    else:
        parts = ", ".join(PARTS[part] for part in steps.first.parts)
        yield f"different from step {steps.first.step} on, first in: {parts}"
        if steps.first.step == 0:
            yield "step 0 is how the runs begin: their first weights are not the same"
        elif steps.first.step == steps.common[0]:
            yield f"no earlier step is in both; compared: {compared}"
        else:
            yield f"identical before it; compared: {compared}"
        if steps.largest_loss_difference is not None:
            step, apart = steps.largest_loss_difference
            yield f"losses are at most {apart:.3g} apart, at step {step}"
    ends = [max(found.entries) for found in diff.fingerprints]
    if ends[0] != ends[1]:
        longer = _NAMES[ends[1] > ends[0]]
        yield f"{longer} continues to step {max(ends)}, with nothing to compare with"
    if all(one.parameters is None or other.parameters is None for one, other in steps.shown):
        yield "parameters were not sampled in both runs, so that they are not compared"
    if all(None in (one.batch, other.batch) for one, other in steps.shown if one.step):
        yield "what each step read was not noted in both runs, so that it is not compared"


_STEP_HEADER = ("step", "loss A", "loss B", "apart", "norm A", "norm B", "parameters", "samples")


def _row(one: Entry, other: Entry) -> tuple[str, ...]:
    apart = loss_difference(one, other)
    different = different_parts(one, other)
    samples = f"{one.consumed_samples}"
    if "consumed_samples" in different:
        samples += f", {other.consumed_samples}"
    elif "batch" in different:
        samples += ", others"
    return (
        str(one.step),
        _number(one.loss),
        _number(other.loss),
        "" if apart is None else f"{apart:.3g}",
        _number(one.grad_norm),
        _number(other.grad_norm),
        "differ" if "parameters" in different else "the same" if one.parameters else "",
        samples,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def _cause(difference: Difference) -> tuple[str, ...]:
    origins = " | ".join(difference.origins) if any(difference.origins) else ""
    return (difference.kind, difference.name, *difference.values, origins)


def as_json(diff: Diff) -> Mapping[str, object]:
    """As docs/diff.md describes it."""
    first = diff.steps.first
    largest = diff.steps.largest_loss_difference
    return {
        "identical": first is None,
        "runs": [
            {
                "path": str(path),
                "first_step": min(found.entries),
                "last_step": max(found.entries),
                "superseded": found.superseded,
                "problems": [*problems],
            }
            for path, found, problems in zip(
                diff.paths, diff.fingerprints, diff.problems, strict=True
            )
        ],
        "compared": {
            "first_step": diff.steps.common[0],
            "last_step": diff.steps.common[-1],
            "steps": len(diff.steps.common),
        },
        "first_difference": None if first is None else attrs.asdict(first),
        "largest_loss_difference": None
        if largest is None
        else {"step": largest[0], "nats": largest[1]},
        "steps": [_step(*pair) for pair in diff.steps.shown],
        "differences": [attrs.asdict(difference) for difference in diff.differences],
    }


def _step(one: Entry, other: Entry) -> dict[str, object]:
    fields = ("fingerprint", *PARTS)
    return {
        "step": one.step,
        "different": [*different_parts(one, other)],
        **{field: [getattr(one, field), getattr(other, field)] for field in fields},
    }
