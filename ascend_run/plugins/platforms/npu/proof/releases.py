"""Schemas of each release of torch_npu, read once from its libraries (scripts/npu_releases.py).

A patch release may be younger than a release of a higher number (2.7.1.post11 came after 2.9.0), so
the schemas of one release do not follow from its neighbours: each schema is recorded with its
ranges.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.plugins.platforms.npu.gaps import RECORD, as_ranges

from .binding import Schema, chosen, parse, problems_of
from .calls import Call

REFERENCE: Final = "2.13.0"
"""The release that is imported for schemas and meta kernels; the others are compared with it."""


@attrs.frozen
class Gap:
    """Why some releases do not take a call as the reference does."""

    operator: str
    problem: str
    releases: tuple[str, ...]
    """Ranges of neighbouring releases, ``2.7.1 - 2.8.0``, or a single one."""

    def __str__(self) -> str:
        return f"{self.operator} {self.problem} in torch_npu {', '.join(self.releases)}"


class Releases:
    """Schemas of every recorded release.

    Args:
        record: ``releases``, in order, and ``operators``: name with overload -> schema -> ranges.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.names: tuple[str, ...] = tuple(record["releases"])
        self._schemas: dict[str, dict[str, list[Schema]]] = {name: {} for name in self.names}
        for name, variants in record["operators"].items():
            operator = name.partition(".")[0]
            for schema, ranges in variants.items():
                for release in self._within(ranges):
                    overloads = self._schemas[release].setdefault(operator, [])
                    overloads.append(parse(schema))
        self.operators = {name.partition(".")[0] for name in record["operators"]}

    def _within(self, ranges: Iterable[str]) -> Iterable[str]:
        for span in ranges:
            first, _, last = span.partition(" - ")
            yield from self.names[self.names.index(first) : self.names.index(last or first) + 1]

    def overloads(self, operator: str, release: str) -> Sequence[Schema]:
        return self._schemas[release].get(operator, ())

    def problems(self, call: Call, release: str) -> list[str]:
        """Return what is wrong with a call in a release.

        Either it does not bind, or it differs from the reference: another argument has its
        position, or an omitted argument has another default. The number of results is not compared:
        each function of ``operators`` uses the first ones, which have not changed.
        """
        overloads = self.overloads(call.operator, release)
        schema = chosen(call, overloads)
        if schema is None:
            return problems_of(call, overloads)
        reference = chosen(call, self.overloads(call.operator, REFERENCE))
        return [] if reference is None else _differences(call, schema, reference)

    def gaps(self, calls: Iterable[Call]) -> list[Gap]:
        """Return every problem of these calls, with the releases that have it."""
        found: dict[tuple[str, str], set[str]] = {}
        for call in calls:
            for release in self.names:
                for problem in self.problems(call, release):
                    found.setdefault((call.operator, problem), set()).add(release)
        return [
            Gap(operator, problem, self.ranges(releases))
            for (operator, problem), releases in sorted(found.items())
        ]

    def ranges(self, releases: Iterable[str]) -> tuple[str, ...]:
        """Return releases as ranges of neighbours."""
        return as_ranges(self.names, set(releases))


def _differences(call: Call, schema: Schema, reference: Schema) -> list[str]:
    problems = []
    pairs = zip(call.positional, schema.arguments, reference.arguments, strict=False)
    for number, (_, there, here) in enumerate(pairs, start=1):
        if there.name != here.name:
            problems.append(f"has '{there.name}' in place {number}, not '{here.name}'")
    given = {*call.named, *(a.name for a in reference.arguments[: len(call.positional)])}
    defaults = {a.name: a.default for a in reference.arguments}
    for argument in schema.arguments:
        if argument.name in given or argument.name not in defaults:
            continue
        if argument.default != defaults[argument.name]:
            was, now = defaults[argument.name], argument.default
            problems.append(f"takes {now!r} for a missing '{argument.name}', not {was!r}")
    return problems


@functools.cache
def releases() -> Releases:
    """Return the record that is installed with this package."""
    return Releases(json.loads(RECORD.read_text(encoding="utf-8")))
