"""Which samples are left out, and why. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

_NAMED: Final = 5
"""Samples named per reason for leaving them out."""


@attrs.frozen(kw_only=True)
class Omitted:
    """The samples that are left out for one reason."""

    count: int = 0
    first: tuple[str, ...] = ()
    """The first of each set of files, as ``file:row``."""


@attrs.define
class Omissions:
    """Which samples are left out, by reason."""

    _found: dict[str, Omitted] = attrs.field(factory=dict, init=False)

    def add(self, reason: str, source: str) -> None:
        """Count one sample."""
        found = self._found.get(reason, Omitted())
        named = (*found.first, source)[:_NAMED]
        self._found[reason] = Omitted(count=found.count + 1, first=named)

    def report(self) -> dict[str, Omitted]:
        """Return reason -> samples, sorted."""
        return dict(sorted(self._found.items()))


def omitted_of_json(values: Mapping[str, Any]) -> dict[str, Omitted]:
    """Return reason -> samples, from the JSON values of such a report.

    Raises:
        KeyError, TypeError, AttributeError: They are none.
    """
    return {
        reason: Omitted(count=found["count"], first=tuple(found["first"]))
        for reason, found in values.items()
    }


def all_omitted(parts: Iterable[Mapping[str, Omitted]]) -> dict[str, Omitted]:
    """Return the samples of several reports, by reason."""
    every: dict[str, Omitted] = {}
    for part in parts:
        for reason, found in part.items():
            known = every.get(reason, Omitted())
            every[reason] = Omitted(
                count=known.count + found.count, first=(*known.first, *found.first)
            )
    return every


def left_out_reasons(left_out: Mapping[str, Omitted]) -> Iterator[str]:
    """Yield one sentence per reason for which samples were left out."""
    for reason, found in left_out.items():
        more = found.count - len(found.first)
        rest = f" and {more} more" if more else ""
        yield f"{reason}: {found.count} ({', '.join(found.first)}{rest})"
