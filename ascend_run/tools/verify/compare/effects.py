"""What a plugin changed in a run, from the activity of the run and of the same run without it.

Only effects count. A plugin whose hooks are called may still do nothing: a wrapper that calls what
it wraps, a threshold that is never reached, a factor of one. It adds calls and operations, but
changes no number, replaces no operation, moves nothing and saves nothing. So added operations alone
are no evidence, while a replaced operation is.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.tools.verify.capture.activity import Activity
from ascend_run.tools.verify.capture.record import Record

from .results import changed_results

Pairs = Sequence[tuple[Activity, Activity]]
"""Of each rank, with and without the plugin."""

_SHOWN: Final = 6
_DIGITS: Final = re.compile(r"\d+")
_UNITS: Final = ((1 << 20, "MiB"), (1 << 10, "KiB"))


@attrs.frozen(kw_only=True)
class Effects:
    """What a run did that the run without the plugin did not do."""

    evidence: tuple[str, ...] = ()
    """Effects."""
    calls: tuple[str, ...] = ()
    """What it did without any effect."""


def effects(candidate: Sequence[Record], without: Sequence[Record]) -> Effects:
    """Compare two runs of the same layout, rank by rank."""
    pairs = [
        (mine.activity, other.activity) for mine, other in zip(candidate, without, strict=True)
    ]
    evidence = [*changed_results(candidate, without)]
    calls = []
    added, replaced = _operations(pairs)
    if replaced:
        evidence.append(f"operations: {_shown({**replaced, **added})}")
    elif added:
        calls.append(f"operations that change nothing: {_shown(added)}")
    evidence += _communication("collectives", pairs, lambda a: a.collectives)
    evidence += _memory(pairs)
    evidence += _surroundings(pairs)
    evidence += _communication("collectives of a save", pairs, _calls_of_save)
    evidence += _saved(pairs)
    constant = [*_constant_metrics(pairs)]
    if constant:
        calls.append(f"metrics that measure nothing: {', '.join(constant[:_SHOWN])}")
    return Effects(evidence=tuple(evidence), calls=tuple(calls))


def effects_of_need(candidate: Sequence[Record], plain: Sequence[Record]) -> Effects:
    """Compare with the plain run on one rank, for a plugin that its layout cannot run without."""
    (first,) = plain
    pairs = [(record.activity, first.activity) for record in candidate]
    evidence = [*_communication("collectives", pairs, lambda a: a.collectives)]
    return Effects(evidence=tuple(evidence))


def _operations(pairs: Pairs) -> tuple[dict[str, int], dict[str, int]]:
    """Operations that were added, and those that were replaced, with the change of their number;
    from the rank where it is largest. Added views are left out."""
    added: dict[str, int] = {}
    replaced: dict[str, int] = {}
    for mine, other in pairs:
        for name in mine.operations.keys() | other.operations.keys():
            change = mine.operations.get(name, 0) - other.operations.get(name, 0)
            if change > 0 and name in mine.passive:
                continue
            kind = added if change > 0 else replaced
            if abs(change) > abs(kind.get(name, 0)):
                kind[name] = change
    return added, replaced


def _communication(
    what: str, pairs: Pairs, read: Callable[[Activity], Mapping[str, Sequence[int]]]
) -> Iterator[str]:
    changes: dict[str, int] = {}
    nbytes = 0
    for mine, other in pairs:
        for name in read(mine).keys() | read(other).keys():
            calls, size = read(mine).get(name, (0, 0))
            their_calls, their_size = read(other).get(name, (0, 0))
            if (calls, size) != (their_calls, their_size):
                changes.setdefault(name, 0)
                if abs(calls - their_calls) > abs(changes[name]):
                    changes[name] = calls - their_calls
                nbytes += size - their_size
    if changes:
        sign = "+" if nbytes >= 0 else "-"
        yield f"{what}: {_shown(changes)}" + (f" ({sign}{_size(abs(nbytes))})" if nbytes else "")


def _calls_of_save(activity: Activity) -> dict[str, list[int]]:
    """Without bytes: a save also gathers descriptions, whose lengths vary."""
    return {name: [calls, 0] for name, (calls, _) in activity.saving.items()}


def _memory(pairs: Pairs) -> Iterator[str]:
    """Tensors that were moved, and activations that are no longer saved."""
    tensors = sum(max(0, mine.copies[0] - other.copies[0]) for mine, other in pairs)
    nbytes = sum(max(0, mine.copies[1] - other.copies[1]) for mine, other in pairs)
    if nbytes:
        yield f"copied {tensors} tensors, {_size(nbytes)}"
    freed = sum(max(0, other.saved_bytes - mine.saved_bytes) for mine, other in pairs)
    if freed:
        yield f"saved for backward: {_size(freed)} less"


def _surroundings(pairs: Pairs) -> Iterator[str]:
    """Settings of the process, the batch, files and metrics."""
    settings = {
        f"{name} = {mine.settings.get(name)}, else {other.settings.get(name)}"
        for mine, other in pairs
        for name in mine.settings.keys() | other.settings.keys()
        if mine.settings.get(name) != other.settings.get(name)
    }
    if settings:
        yield f"settings: {', '.join(sorted(settings)[:_SHOWN])}"
    fields = {
        name
        for mine, other in pairs
        for name, digest in other.batch.items()
        if mine.batch.get(name) != digest
    }
    if fields:
        yield f"fields of the batch that differ: {', '.join(sorted(fields))}"
    files = {name for mine, other in pairs for name in _new_files(mine, other)}
    if files:
        yield f"files: {', '.join(sorted(files)[:_SHOWN])}"
    measured = {
        name
        for mine, other in pairs
        for name, values in mine.metrics.items()
        if name not in other.metrics and _measures(values)
    }
    if measured:
        yield f"metrics that change: {', '.join(sorted(measured)[:_SHOWN])}"


def _new_files(mine: Activity, other: Activity) -> Iterator[str]:
    """Files that only one run has; names may contain times and process ids."""
    known = Counter(_DIGITS.sub("0", name) for name in other.files)
    for name in mine.files:
        kind = _DIGITS.sub("0", name)
        known[kind] -= 1
        if known[kind] < 0:
            yield name


def _saved(pairs: Pairs) -> Iterator[str]:
    """What a checkpoint holds."""
    dropped = {key for mine, other in pairs for key in {*other.checkpoint} - {*mine.checkpoint}}
    if dropped:
        yield f"checkpoint: {len(dropped)} tensors less"
    growing = {key for mine, other in pairs for key in {*mine.growing} - {*other.growing}}
    if growing:
        yield f"checkpoint: {', '.join(sorted(growing)[:_SHOWN])}"


def _constant_metrics(pairs: Pairs) -> Iterator[str]:
    names = {
        name
        for mine, other in pairs
        for name, values in mine.metrics.items()
        if name not in other.metrics and not _measures(values)
    }
    yield from sorted(names)


def _measures(values: Sequence[float]) -> bool:
    """Whether values are neither constant nor a count of steps."""
    changes = {round(b - a, 12) for a, b in itertools.pairwise(values)}
    return len(changes) > 1


def _shown(changes: Mapping[str, int]) -> str:
    ordered = sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0]))
    parts = [f"{change:+d} {name}" for name, change in ordered[:_SHOWN]]
    more = len(ordered) - len(parts)
    return ", ".join([*parts, *([f"and {more} more"] if more else [])])


def _size(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
